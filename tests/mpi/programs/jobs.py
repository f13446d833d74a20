"""Whole jobs without torch, through ``mpihpo.run``."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import mpihpo
from mpihpo.errors import ExperimentError, InternalError
from tests.mpi.programs.surroundings import error_from

WORLD = MPI.COMM_WORLD
SPACE = {
    "lr": {"lower": 1e-4, "upper": 1.0, "log": True},
    "width": {"lower": 1, "upper": 64, "integer": True},
    "kind": {"choices": ["a", "b", "c"]},
    "extra": {"lower": 0.0, "upper": 1.0, "when": {"kind": "b"}},
}
SEEN: list[dict[str, Any]] = []
"""What the training function saw on this rank."""


def experiment(**changes: Any) -> dict[str, Any]:
    return {
        "objective": {"metric": "loss"},
        "search": {"trials": 11, "space": SPACE},
        "schedule": {"max_epochs": 8},
        "process_group": "none",
        "seed": 5,
        **changes,
    }


def finished(results: mpihpo.Results) -> mpihpo.Results:
    """The results of a job in which nothing failed."""
    problems = [f"trial {row['id']}: {row['error']}" for row in results.trials if row["error"]]
    assert not problems, problems
    assert results.reason == "completed"
    return results


def loss(config: dict[str, Any], epoch: int) -> float:
    """The same for any number of ranks, and not monotone in the configuration."""
    text = json.dumps(config, sort_keys=True).encode()
    return int(hashlib.sha256(text).hexdigest()[:6], 16) / 2**24 + 1.0 / epoch


def train(config: dict[str, Any], trial: Any) -> None:
    assert "torch" not in sys.modules, "torch was imported with process_group: none"
    history = np.zeros(3)
    trial.attach(history=history)
    assert history[0] == trial.start, "the state of the rung before is not here"
    configurations = trial.comm.allgather(json.dumps(config, sort_keys=True))
    assert len(set(configurations)) == 1, f"ranks with different configurations: {configurations}"
    for epoch in trial.epochs():
        history += 1
        value = loss(config, epoch)  # a mean of equal values may differ from them in the last bit
        assert np.isclose(trial.mean(value), value)
        trial.report(epoch, loss=value, epoch_again=epoch)
    SEEN.append(
        {
            "trial": trial.id,
            "rung": trial.rung,
            "size": trial.world_size,
            "place": trial.rank,
            "rank": WORLD.rank,
        }
    )


def deterministic() -> None:
    """Prints what must not depend on the number of ranks."""
    results = finished(mpihpo.run(experiment(), train))
    assert "torch" not in sys.modules
    digests = WORLD.allgather(digest(results))
    assert len(set(digests)) == 1, "the ranks got different results"
    if WORLD.rank == 0:
        facts = {
            "configurations": [results.config(int(row["id"])) for row in results.trials],
            "reached": [[int(row["rung"]), int(row["epochs"])] for row in results.trials],
            "statuses": [str(row["status"]) for row in results.trials],
            "objectives": sorted(
                [int(row["trial"]), int(row["rung"]), float(row["objective"])]
                for row in results.evaluations
            ),
            "curves": sorted(
                [int(row["trial"]), int(row["epoch"]), float(row["value"])]
                for row in results.curves()
            ),
            "best": [results.best.trial, results.best.objective] if results.best else None,
        }
        sys.stdout.write(json.dumps(facts) + "\n")
    check_allocations(results)
    SEEN.clear()


def digest(results: mpihpo.Results) -> str:
    tables = [
        results.trials,
        results.evaluations,
        results.evaluation_ranks,
        results.ranks,
        results.ladder,
        *(results.curves(name) for name in results.metrics),
    ]
    text = [results.summary(), results.experiment_text, results.reason, str(results.best)]
    content = b"".join(table.tobytes() for table in tables) + "".join(text).encode()
    return hashlib.sha256(content).hexdigest()


def check_allocations(results: mpihpo.Results) -> None:
    """The groups that there were are those of the record."""
    seen = [each for rank in WORLD.allgather(SEEN) for each in rank]
    recorded: dict[tuple[int, int], list[int]] = {}
    for row in results.evaluation_ranks:
        evaluation = results.evaluations[row["evaluation"]]
        key = (int(evaluation["trial"]), int(evaluation["rung"]))
        first = int(row["first_rank"])
        recorded.setdefault(key, []).extend(range(first, first + int(row["ranks"])))
    found: dict[tuple[int, int], list[int]] = {}
    for each in seen:
        key = (each["trial"], each["rung"])
        found.setdefault(key, []).append(each["rank"])
        assert each["size"] == len(recorded[key])
    assert {key: sorted(ranks) for key, ranks in found.items()} == {
        key: sorted(ranks) for key, ranks in recorded.items()
    }
    for key in found:
        places = sorted(each["place"] for each in seen if (each["trial"], each["rung"]) == key)
        assert places == list(range(len(places)))


def dedicated_coordinator() -> None:
    results = finished(mpihpo.run(experiment(coordinator="dedicated"), train))
    assert len(set(WORLD.allgather(digest(results)))) == 1
    assert bool(SEEN) == (WORLD.rank != 0), f"rank {WORLD.rank} trained {len(SEEN)} times"
    check_allocations(results)
    SEEN.clear()


def attributes_communicate_nothing() -> None:
    """One rank reads all of them, the others none, and they go on together."""

    def looking(config: dict[str, Any], trial: Any) -> None:
        if trial.rank == trial.world_size - 1:
            for name in dir(trial):
                if not name.startswith("_"):
                    getattr(trial, name)
            repr(trial)
            assert trial.comm.Get_size() == trial.world_size
        for epoch in trial.epochs():
            assert trial.mean(float(trial.rank)) == (trial.world_size - 1) / 2
            trial.report(epoch, loss=1.0)

    settings = {"policy": "fixed", "ranks": 2}
    finished(mpihpo.run(experiment(allocation=settings, search=few(3)), looking))


def few(trials: int) -> dict[str, Any]:
    return {"trials": trials, "space": SPACE}


def means() -> None:
    def averaging(config: dict[str, Any], trial: Any) -> None:
        me, size = trial.rank, trial.world_size
        for epoch in trial.epochs():
            values = trial.comm.allgather(trial.mean(float(me * me), weight=me + 1))
            right = sum(r * r * (r + 1) for r in range(size)) / sum(r + 1 for r in range(size))
            assert np.allclose(values, right)
            assert len(set(values)) == 1
            # A rank without samples has no value to give.
            only_last = trial.mean(7.0 if me == size - 1 else float("nan"), float(me == size - 1))
            assert only_last == 7.0
            assert trial.mean(np.float32(2.5)) == 2.5
            trial.report(epoch, loss=values[0])

    for ranks in range(1, WORLD.size + 1):
        settings = {"policy": "fixed", "ranks": ranks}
        short = {"scheduler": "none", "max_epochs": 2}
        changed = experiment(allocation=settings, search=few(2), schedule=short)
        finished(mpihpo.run(changed, averaging))


def batches_of_resized_trials() -> None:
    """What a trial is told about its batch on one rank and on more."""

    def looking(config: dict[str, Any], trial: Any) -> None:
        size = trial.world_size
        told = (trial.global_batch_size, trial.per_rank_batch_size, trial.lr_scale)
        right = {
            "keep_global none": (12, -(-12 // size), 1.0),
            "keep_per_rank none": (12 * size, 12, 1.0),
            "keep_per_rank linear": (12 * size, 12, float(size)),
            "keep_per_rank sqrt": (12 * size, 12, float(np.sqrt(size))),
        }[trial.arguments["batch"]]
        assert np.allclose(told, right), f"{told} on {size} ranks, {right} is right"
        SEEN.append({"size": size})
        for epoch in trial.epochs():
            trial.report(epoch, loss=loss(config, epoch))

    for batch in (
        "keep_global none",
        "keep_per_rank none",
        "keep_per_rank linear",
        "keep_per_rank sqrt",
    ):
        on_resize, lr_scaling = batch.split()
        settings = {"size": 12, "on_resize": on_resize, "lr_scaling": lr_scaling}
        finished(
            mpihpo.run(
                experiment(batch=settings, arguments={"batch": batch}, search=few(4)), looking
            )
        )
        sizes = {each["size"] for rank in WORLD.allgather(SEEN) for each in rank}
        assert len(sizes) > 1, "no trial was resized"
        SEEN.clear()


def the_cache_lasts() -> None:
    made: list[int] = []

    def caching(config: dict[str, Any], trial: Any) -> None:
        data = trial.cache("data", lambda: made.append(trial.id) or np.arange(5))
        data[0] += 1
        SEEN.append({"data": data})
        for epoch in trial.epochs():
            trial.report(epoch, loss=loss(config, epoch))

    finished(mpihpo.run(experiment(), caching))
    assert len(made) == (1 if SEEN else 0)
    assert all(each["data"] is SEEN[0]["data"] for each in SEEN)
    assert all(each["data"][0] == len(SEEN) for each in SEEN)
    SEEN.clear()
    finished(mpihpo.run(experiment(search=few(2)), caching))  # another job has its own
    assert len(made) <= 2
    SEEN.clear()


def a_failing_member() -> None:
    """One rank of a trial fails while the others wait for it in MPI; the other trials go on."""

    def failing(config: dict[str, Any], trial: Any) -> None:
        for epoch in trial.epochs():
            if trial.id == 2 and trial.rank == trial.world_size - 1:
                raise ArithmeticError(f"on purpose, on rank {trial.rank} of {trial.world_size}")
            trial.comm.Barrier()
            trial.report(epoch, loss=loss(config, epoch))

    settings = {"policy": "fixed", "ranks": min(2, WORLD.size)}
    began = time.monotonic()
    results = mpihpo.run(experiment(allocation=settings), failing)
    assert time.monotonic() - began < 40
    failed = results.trials[results.trials["status"] == "failed"]
    assert list(failed["id"]) == [2]
    assert "ArithmeticError" in failed["error"][0]
    assert "on purpose" in failed["error"][0]
    assert len(results.trials) == 11
    assert results.best is not None


def wrong_experiments() -> None:
    """Every rank gets the same error, and can go on."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"nonsense": 1}, "nonsense"),
        ({"allocation": {"ranks": WORLD.size + 1}}, "allocation.ranks"),
        ({"train": "mpihpo_nowhere:train"}, "train"),
    ]
    for changes, where in wrong:
        function = None if "train" in changes else train
        text = error_from(ExperimentError, mpihpo.run, experiment(**changes), function)
        assert set(WORLD.allgather(text)) == {text}
        assert text.startswith(where), text


def embedded() -> None:
    """On a part of the ranks, on one's own, and backwards, beside the caller's own messages."""
    halves = WORLD.Split(WORLD.rank % 2, -WORLD.rank)
    request = halves.isend("mine", (halves.rank + 1) % halves.size, 3)
    results = finished(mpihpo.run(experiment(search=few(4)), train, comm=halves))
    assert len(results.ranks) == halves.size
    assert halves.recv(source=(halves.rank - 1) % halves.size, tag=3) == "mine"
    request.wait()
    alone = finished(mpihpo.run(experiment(search=few(3)), train, comm=MPI.COMM_SELF))
    assert len(alone.ranks) == 1
    bests = WORLD.allgather(alone.best)
    assert all(best == bests[0] for best in bests)
    halves.Free()
    SEEN.clear()


class Exiting:
    """A searcher that ends the process, as far as it can."""

    def __init__(self, *, space: Any, seed: int, mode: str, trials: int | None) -> None:
        self.space, self.seed = space, seed

    def ask(self, trial_id: int) -> Any:
        if trial_id == 3:
            sys.exit("no more")
        return self.space.sample(self.seed, trial_id)

    def tell(self, outcome: Any) -> None:
        pass


def a_searcher_that_exits() -> None:
    """A fault of the runtime's extensions is an error on every rank, not a hang."""
    search = {**few(8), "searcher": f"{__name__}:Exiting"}
    text = error_from(InternalError, lambda: mpihpo.run(experiment(search=search), train))
    assert "no more" in text
