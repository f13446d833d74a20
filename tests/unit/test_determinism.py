from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpihpo.allocation import Topology
from mpihpo.instructions import Instruction
from mpihpo.records import Evaluation
from tests.unit.virtual_clock import Run, jitter, make


def noisy(work: Evaluation) -> float | None:
    """A loss that depends on trial and epoch only; one trial in ten fails, many are equal."""
    digest = hashlib.sha256(f"{work.trial.id}:{work.stop}".encode()).digest()
    return None if digest[0] % 10 == 0 else digest[1] % 16 / work.stop


def history(run: Run) -> list[object]:
    """What must not depend on the ranks."""
    assert run.coordinator.best is not None
    trials = sorted({a.evaluation.trial.id for a in run.starts})
    seen = {a.evaluation.trial.id: a.evaluation.trial for a in run.starts}
    best = run.coordinator.best
    return [
        [(seen[i].config_hash, seen[i].seed, run.coordinator.status(i)) for i in trials],
        run.rungs,
        (best.allocation.evaluation, best.objective),
        run.reason,
    ]


@pytest.mark.parametrize("factor", [2, 3])
def test_same_trials_and_promotions_on_any_number_of_ranks(factor: int) -> None:
    def on(world: int) -> list[object]:
        coordinator = make(27, world=world, factor=factor, epochs=(1, 9))
        return history(Run(coordinator, noisy, jitter(world)).drive())

    reference = on(1)
    for world in (3, 4, 5, 7):
        assert on(world) == reference


@given(
    trials=st.integers(1, 20),
    factor=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ranks=st.integers(1, 4),
    max_ranks=st.one_of(st.none(), st.integers(4, 6)),
    policy=st.sampled_from(["fixed", "doubling"]),
    known=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_experiment_ends_with_the_result_of_one_rank(
    trials: int,
    factor: int,
    sizes: list[int],
    ranks: int,
    max_ranks: int | None,
    policy: str,
    known: bool,
    seed: int,
) -> None:
    def value(work: Evaluation) -> float | None:
        return None if (work.trial.id * 7 + work.rung + seed) % 5 == 0 else work.trial.id % 3

    def run(topology: Topology, ranks: int) -> Run:
        coordinator = make(
            trials,
            world=topology,
            factor=factor,
            limit=trials if known else None,
            policy=policy,
            ranks=ranks,
            max_ranks=max_ranks,
        )
        return Run(coordinator, value, jitter(seed)).drive()

    topology = Topology(tuple(node for node, size in enumerate(sizes) for _ in range(size)))
    many = run(topology, min(ranks, topology.size))
    one = run(Topology.even(1), 1)
    assert many.rungs == one.rungs
    assert many.reason == one.reason
    best = many.coordinator.best
    if best is None:
        assert many.remembered() == {}
    else:
        assert set(many.remembered()) == {best.allocation.evaluation.trial.id}


@pytest.mark.parametrize("world", [1, 4, 7])
def test_replayed_outcomes_give_the_same_instructions(world: int) -> None:
    original = Run(make(27, world=world, factor=3, epochs=(1, 9)), noisy, jitter(8)).drive()
    again = make(27, world=world, factor=3, epochs=(1, 9))
    log: list[Instruction] = again.begin(0.0)
    for outcome in original.outcomes:
        # Stands for a record that was read from a file: equal, but not the same object.
        log += again.tell(replace(outcome, allocation=replace(outcome.allocation)), 0.0)
    assert log == original.log
    assert again.done
