from __future__ import annotations

import itertools
import random

import pytest

from mpihpo.errors import InternalError
from mpihpo.records import Ending, Evaluation, Objective, RungResult, Status, TrialRecord
from mpihpo.schedule import Scheduler, ScheduleSettings, build_scheduler
from tests.unit.virtual_clock import LOSS, ended, evaluation, trial


def scheduler(
    trials: int | None,
    *,
    supply: int | None = None,
    name: str = "successive_halving",
    factor: int = 2,
    epochs: tuple[int, int] = (1, 4),
    objective: Objective = LOSS,
) -> Scheduler:
    """One whose searcher has ``supply`` configurations."""
    ids = itertools.count() if supply is None else iter(range(supply))

    def propose() -> TrialRecord | None:
        number = next(ids, None)
        return None if number is None else trial(number)

    settings = ScheduleSettings(
        scheduler=name, reduction_factor=factor, min_epochs=epochs[0], max_epochs=epochs[1]
    )
    return build_scheduler(settings, objective=objective, trials=trials, propose=propose)


def drain(halving: Scheduler) -> list[Evaluation]:
    """All evaluations that may start now."""
    return list(iter(halving.ask, None))


def rung(halving: Scheduler, values: dict[int, float | None], *, seed: int = 0) -> list[int]:
    """Run one rung whole, in random order; returns the ids in the order handed out."""
    out = drain(halving)
    for work in random.Random(seed).sample(out, len(out)):
        value = values[work.trial.id]
        halving.tell(ended(work, value, Ending.FAILED if value is None else Ending.FINISHED))
    return [work.trial.id for work in out]


def test_ladder_of_eight_trials() -> None:
    halving = scheduler(8)
    losses: dict[int, float | None] = {i: float(i * 3 % 8) for i in range(8)}  # best: 0 3 6 1
    assert rung(halving, losses) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [halving.status(i) for i in (0, 1, 2)] == [
        Status.PARKED,
        Status.PARKED,
        Status.STOPPED,
    ]
    assert rung(halving, losses) == [0, 3, 6, 1]
    assert not halving.done
    assert rung(halving, losses) == [0, 3]
    assert halving.done
    assert halving.ask() is None
    assert halving.results() == (
        RungResult(rung=0, start=0, stop=1, evaluated=8, failed=0, promoted=(0, 3, 6, 1), best=0.0),
        RungResult(rung=1, start=1, stop=2, evaluated=4, failed=0, promoted=(0, 3), best=0.0),
        RungResult(rung=2, start=2, stop=4, evaluated=2, failed=0, promoted=(), best=0.0),
    )
    assert halving.status(0) is halving.status(3) is Status.COMPLETED
    assert halving.status(6) is Status.STOPPED


def test_evaluations_cover_the_epochs_without_a_gap() -> None:
    halving = scheduler(3, factor=3, epochs=(2, 7))
    reach = dict.fromkeys(range(3), 0)
    while not halving.done:
        for work in drain(halving):
            assert work.start == reach[work.trial.id] < work.stop
            reach[work.trial.id] = work.stop
            halving.tell(ended(work, float(work.trial.id)))
    assert reach == {0: 7, 1: 2, 2: 2}


@pytest.mark.parametrize("seed", range(5))
def test_order_of_outcomes_does_not_matter(seed: int) -> None:
    halving = scheduler(9, factor=3)
    losses: dict[int, float | None] = {i: float((i * 5) % 9) for i in range(9)}
    rung(halving, losses, seed=seed)
    assert halving.results()[0].promoted == (0, 2, 4)


def test_ties_go_to_the_lower_id() -> None:
    halving = scheduler(4)
    rung(halving, dict.fromkeys(range(4), 1.0), seed=3)
    assert halving.results()[0].promoted == (0, 1)


def test_maximisation() -> None:
    halving = scheduler(4, objective=Objective(metric="accuracy", mode="max"))
    rung(halving, {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.8})
    assert halving.results()[0].promoted == (1, 3)
    assert halving.results()[0].best == 0.9


def test_failed_trials_are_never_promoted() -> None:
    halving = scheduler(8)
    losses: dict[int, float | None] = dict.fromkeys(range(8))
    rung(halving, losses | {2: 9.0, 5: 3.0, 7: 8.0})
    first = halving.results()[0]
    assert (first.evaluated, first.failed, first.promoted) == (8, 5, (5, 7, 2))
    assert halving.status(0) is Status.FAILED
    # Four were planned for the second rung, so two of the three go on.
    rung(halving, {2: 1.0, 5: 2.0, 7: 3.0})
    assert halving.results()[1].promoted == (2, 5)


def test_one_trial_goes_on_while_any_finished() -> None:
    halving = scheduler(2, factor=4)
    rung(halving, {0: None, 1: 5.0})
    assert halving.results()[0].promoted == (1,)


def test_all_failed_ends_it() -> None:
    halving = scheduler(3)
    rung(halving, dict.fromkeys(range(3)))
    assert halving.done
    assert halving.ask() is None
    assert halving.results() == (
        RungResult(rung=0, start=0, stop=1, evaluated=3, failed=3, promoted=(), best=None),
    )


def test_all_promoted_failed_ends_it() -> None:
    halving = scheduler(4)
    rung(halving, {i: float(i) for i in range(4)})
    rung(halving, {0: None, 1: None})
    assert halving.done
    assert halving.results()[1].promoted == ()
    assert [halving.status(i) for i in range(4)] == [Status.FAILED] * 2 + [Status.STOPPED] * 2


@pytest.mark.parametrize("trials", [None, 8])
def test_exhausted_searcher_makes_the_rung_smaller(trials: int | None) -> None:
    halving = scheduler(trials, supply=5)
    assert rung(halving, {i: float(i) for i in range(5)}) == [0, 1, 2, 3, 4]
    assert rung(halving, {0: 0.0, 1: 1.0}) == [0, 1]
    assert [result.evaluated for result in halving.results()] == [5, 2]


def test_exhaustion_found_after_the_last_outcome_closes_the_rung() -> None:
    halving = scheduler(None, supply=1)
    work = halving.ask()
    assert work is not None
    halving.tell(ended(work, 1.0))
    assert halving.results() == ()
    promoted = halving.ask()
    assert promoted is not None
    assert promoted.rung == 1
    assert halving.results()[0].promoted == (0,)


def test_nothing_to_try() -> None:
    halving = scheduler(None, supply=0)
    assert halving.ask() is None
    assert halving.done
    assert halving.results() == ()


def test_interrupted_trials_keep_the_rung_open() -> None:
    halving = scheduler(2)
    first, second = drain(halving)
    halving.tell(ended(first, 1.0))
    halving.tell(ended(second, ending=Ending.INTERRUPTED))
    assert halving.results() == ()
    assert not halving.done
    assert halving.ask() is None
    assert halving.status(0) is halving.status(1) is Status.PARKED


def test_new_trials_are_drawn_only_when_asked_for() -> None:
    drawn: list[int] = []

    def propose() -> TrialRecord:
        drawn.append(len(drawn))
        return trial(drawn[-1])

    settings = ScheduleSettings(max_epochs=4)
    halving = build_scheduler(settings, objective=LOSS, trials=3, propose=propose)
    assert drawn == []
    halving.ask()
    assert drawn == [0]
    drain(halving)
    assert drawn == [0, 1, 2]


def test_foreign_outcomes_are_refused() -> None:
    halving = scheduler(2)
    work = halving.ask()
    assert work is not None
    with pytest.raises(InternalError, match="trial 1 at rung 0"):
        halving.tell(ended(evaluation(1), 1.0))
    halving.tell(ended(work, 1.0))
    with pytest.raises(InternalError, match="trial 0 at rung 0"):
        halving.tell(ended(work, 1.0))


def test_none_trains_every_trial_in_one_rung() -> None:
    everything = scheduler(3, name="none", epochs=(1, 6))
    out = drain(everything)
    assert [(work.rung, work.start, work.stop) for work in out] == [(0, 0, 6)] * 3
    for work in out:
        everything.tell(ended(work, 1.0))
    assert everything.done
    assert [everything.status(i) for i in range(3)] == [Status.COMPLETED] * 3
    assert everything.results()[0].promoted == ()
