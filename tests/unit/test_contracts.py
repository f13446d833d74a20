"""What every built-in searcher, scheduler and policy promises, whatever else it does."""

from __future__ import annotations

import random

import pytest

from mpihpo.allocation import POLICIES, AllocationSettings, build_policy
from mpihpo.records import Ending, Evaluation, Outcome, Status
from mpihpo.schedule import SCHEDULERS, ScheduleSettings, build_scheduler, scheduler_class
from mpihpo.search import SEARCHERS, Searcher, SearchSettings, Space, build_searcher
from tests.unit.virtual_clock import LOSS, Run, ended, evaluation, jitter, make, trial

SPACE = Space.from_mapping(
    {
        "lr": {"lower": 1e-4, "upper": 1.0, "log": True, "steps": 4},
        "layers": {"lower": 1, "upper": 3, "integer": True},
        "optimizer": {"choices": ["sgd", "adam"]},
        "momentum": {"lower": 0.5, "upper": 0.9, "steps": 2, "when": {"optimizer": "sgd"}},
    }
)


def searcher(name: str, seed: int = 3, trials: int = 6) -> Searcher:
    settings = SearchSettings(searcher=name, space=SPACE, trials=trials)
    return build_searcher(settings, seed=seed, mode="min")


@pytest.mark.parametrize("name", SEARCHERS)
class TestSearcher:
    def test_proposes_so_many_configurations_and_then_none(self, name: str) -> None:
        asked = searcher(name)
        assert all(asked.ask(i) is not None for i in range(6))
        assert asked.ask(6) is None
        assert asked.ask(7) is None

    def test_values_lie_in_the_space(self, name: str) -> None:
        asked = searcher(name)
        for i in range(6):
            config = asked.ask(i)
            assert config is not None
            assert {"lr", "layers", "optimizer"} <= set(config) <= set(SPACE)
            assert 1e-4 <= config["lr"] <= 1.0  # type: ignore[operator]
            assert config["layers"] in (1, 2, 3)
            assert ("momentum" in config) == (config["optimizer"] == "sgd")

    def test_is_repeatable_from_the_seed(self, name: str) -> None:
        first, second = searcher(name), searcher(name)
        for i in range(6):
            config = first.ask(i)
            assert config == second.ask(i)
            assert config is not None
            for asked in (first, second):
                asked.tell(ended(evaluation(i), float(i)))

    def test_takes_every_kind_of_outcome(self, name: str) -> None:
        asked = searcher(name)
        asked.ask(0)
        for ending in Ending:
            asked.tell(ended(evaluation(0), 1.0, ending))
        assert asked.ask(1) is not None


def walk(name: str, seed: int, trials: int = 11) -> list[Evaluation | Outcome]:
    """All that goes in and out of a scheduler: random outcomes, up to five running at once."""
    rng = random.Random(seed)
    ids = iter(range(trials))
    scheduler = build_scheduler(
        ScheduleSettings(scheduler=name, reduction_factor=3, max_epochs=9),
        objective=LOSS,
        trials=trials,
        propose=lambda: trial(next(ids)),
    )
    history: list[Evaluation | Outcome] = []
    running: list[Evaluation] = []
    reached: dict[int, int] = {}
    while not scheduler.done:
        while len(running) < 5:
            work = scheduler.ask()
            if work is None:
                break
            history.append(work)
            assert work.trial.id not in {other.trial.id for other in running}
            assert work.start == reached.get(work.trial.id, 0) < work.stop <= 9
            assert scheduler.status(work.trial.id) is Status.RUNNING
            running.append(work)
        work = running.pop(rng.randrange(len(running)))
        failed = rng.random() < 0.15
        value = None if failed else rng.random()
        outcome = ended(work, value, Ending.FAILED if failed else Ending.FINISHED)
        history.append(outcome)
        before = scheduler.results()
        scheduler.tell(outcome)
        reached[work.trial.id] = -1 if failed else work.stop
        assert (scheduler.status(work.trial.id) is Status.FAILED) == failed
        assert scheduler.results()[: len(before)] == before
    assert not running
    assert scheduler.ask() is None
    statuses = [scheduler.status(i) for i in range(trials)]
    assert set(statuses) <= {Status.STOPPED, Status.COMPLETED, Status.FAILED}
    completed = [i for i in range(trials) if statuses[i] is Status.COMPLETED]
    assert completed == [i for i in range(trials) if reached[i] == 9]
    evaluated = sum(result.evaluated for result in scheduler.results())
    assert evaluated == sum(isinstance(entry, Outcome) for entry in history)
    return history


@pytest.mark.parametrize("name", SCHEDULERS)
class TestScheduler:
    @pytest.mark.parametrize("seed", range(5))
    def test_trains_without_gaps_and_ends(self, name: str, seed: int) -> None:
        started = {entry.trial.id for entry in walk(name, seed) if isinstance(entry, Evaluation)}
        assert started == set(range(11))

    def test_equal_outcomes_give_equal_decisions(self, name: str) -> None:
        assert walk(name, 1) == walk(name, 1)

    @pytest.mark.parametrize("trials", [1, 2, 11])
    def test_ladder_is_what_happens_when_none_fails(self, name: str, trials: int) -> None:
        settings = ScheduleSettings(scheduler=name, reduction_factor=3, max_epochs=9)
        ladder = scheduler_class(settings).ladder(settings, trials)
        assert ladder[0].start == 0
        assert ladder[0].trials == trials
        assert ladder[-1].stop == 9
        coordinator = make(trials, scheduler=name, factor=3, epochs=(1, 9))
        run = Run(coordinator, lambda work: float(work.trial.id), jitter(trials)).drive()
        assert [(p.rung, p.start, p.stop, p.trials) for p in ladder] == [
            (r.rung, r.start, r.stop, r.evaluated) for r in run.rungs
        ]

    @pytest.mark.parametrize("policy", POLICIES)
    def test_runs_under_every_policy(self, name: str, policy: str) -> None:
        coordinator = make(11, world=5, scheduler=name, factor=3, epochs=(1, 9), policy=policy)
        run = Run(coordinator, lambda work: work.trial.id % 4, jitter(1)).drive()
        assert run.reason == "completed"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("world", [1, 3, 8, 24576])
@pytest.mark.parametrize("max_ranks", [None, 1, 5])
class TestPolicy:
    def test_width_and_shares(self, name: str, world: int, max_ranks: int | None) -> None:
        settings = AllocationSettings(policy=name, ranks=1, max_ranks=max_ranks)
        policy = build_policy(settings, reduction_factor=2, world_size=world)
        limit = min(world, max_ranks or world)
        for rung in range(40):
            work = [evaluation(i, rung=rung) for i in range(5)]
            widths = [policy.width(entry) for entry in work]
            assert all(1 <= width <= limit for width in widths)
            assert widths == [policy.width(entry) for entry in work]
            fitting = [i for i in range(1, 6) if sum(widths[:i]) <= world]
            for count in fitting:
                shares = policy.share(work[:count], world)
                assert len(shares) == count
                assert sum(shares) <= world
                assert all(
                    width <= share <= limit
                    for width, share in zip(widths[:count], shares, strict=True)
                )
