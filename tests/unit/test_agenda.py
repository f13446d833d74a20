"""Failures that are tried again, states that are lost, and the end of the job's time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpihpo.allocation.pace import Pace
from mpihpo.history import History
from mpihpo.records import Allocation, Ending, Evaluation, Outcome, Report, Status
from tests.unit.virtual_clock import ListSearcher, Run, ended, evaluation, make, sizes, trial, unit

ONE_RUNG = {"scheduler": "none", "epochs": (1, 4)}


def failing(
    *failures: tuple[int, int, str | None], times: int = 1
) -> Callable[[Evaluation], float | str | None]:
    """(trial, rung, kind of error): fails so many times there, and elsewhere never."""
    left = {(trial_id, rung): times for trial_id, rung, _ in failures}
    kinds = {(trial_id, rung): kind for trial_id, rung, kind in failures}

    def value(work: Evaluation) -> float | str | None:
        key = work.trial.id, work.rung
        if left.get(key):
            left[key] -= 1
            return kinds[key]
        return float(work.trial.id)

    return value


def of_trial(run: Run, trial_id: int) -> list[Allocation]:
    return [start for start in run.starts if start.evaluation.trial.id == trial_id]


@pytest.mark.parametrize(("retries", "failures"), [(0, 1), (1, 1), (1, 2), (3, 3), (3, 4)])
def test_a_failed_evaluation_is_started_again_so_often(retries: int, failures: int):
    searcher = ListSearcher(3)
    coordinator = make(3, world=2, searcher=searcher, retries=retries, **ONE_RUNG)
    run = Run(coordinator, failing((1, 0, None), times=failures)).drive()
    has_failed = failures > retries
    assert len(of_trial(run, 1)) == min(failures, retries) + 1
    assert coordinator.status(1) is (Status.FAILED if has_failed else Status.COMPLETED)
    # Searcher and scheduler learn of the last attempt only.
    told = [outcome for outcome in searcher.told if outcome.allocation.evaluation.trial.id == 1]
    assert [outcome.ending for outcome in told] == [
        Ending.FAILED if has_failed else Ending.FINISHED
    ]
    assert len(searcher.told) == 3
    assert [(result.evaluated, result.failed) for result in run.rungs] == [(3, int(has_failed))]


def test_retries_count_per_trial_and_not_per_rung():
    value = failing((1, 0, None), (1, 1, None))
    run = Run(make(4, retries=1), value).drive()
    assert [start.evaluation.rung for start in of_trial(run, 1)] == [0, 0, 1]
    assert run.coordinator.status(1) is Status.FAILED


def test_a_retry_on_a_higher_rung_has_the_same_start_and_holders():
    run = Run(make(4, retries=1), failing((0, 1, None))).drive()
    first, again = [start for start in of_trial(run, 0) if start.evaluation.rung == 1]
    assert first.evaluation == again.evaluation
    assert again.holders == first.holders != ()
    assert again.serial > first.serial
    assert run.reason == "completed"
    assert run.coordinator.status(0) is Status.COMPLETED


def test_a_trial_that_waits_for_its_retry_is_not_running():
    coordinator = make(2, world=1, retries=1, **ONE_RUNG)
    run = Run(coordinator, failing((0, 0, None)))
    run.drive(outcomes=1)
    assert coordinator.status(0) is Status.RUNNING  # again, and before trial 1
    assert coordinator.snapshot().counts == {Status.RUNNING: 1}
    coordinator = make(2, world=1, retries=1, **ONE_RUNG)
    run = Run(coordinator, failing((0, 0, None)))
    run.obey(coordinator.begin(0.0))
    coordinator.stop("SIGTERM", 0.5)
    run.tell(run.starts[0], None, Ending.FAILED)
    assert coordinator.status(0) is Status.PENDING
    assert run.reason == "SIGTERM"


def test_an_evaluation_out_of_memory_gets_twice_the_ranks():
    value = failing((0, 0, "OutOfMemoryError"), times=3)
    run = Run(make(6, world=6, retries=3, **ONE_RUNG), value).drive()
    # Ranks that others hold are waited for; the world is the most there is.
    assert [len(start.ranks) for start in of_trial(run, 0)] == [1, 2, 4, 6]
    assert run.coordinator.status(0) is Status.COMPLETED


def test_a_trial_keeps_the_ranks_that_it_needs_on_later_rungs():
    value = failing((0, 0, "MemoryError"))
    run = Run(make(4, world=4, retries=1, policy="fixed", ranks=1), value).drive()
    widths = [len(start.ranks) for start in of_trial(run, 0)]
    assert widths[0] == 1
    assert len(widths) > 2
    assert set(widths[1:]) == {2}
    assert {len(start.ranks) for start in run.starts if start.evaluation.trial.id} == {1}


def test_out_of_memory_without_retries_fails():
    run = Run(make(2, **ONE_RUNG), failing((0, 0, "OutOfMemoryError"))).drive()
    assert len(of_trial(run, 0)) == 1
    assert run.coordinator.status(0) is Status.FAILED


def resumed(saved: dict[int, frozenset[int]], *, retries: int = 0) -> Run:
    """A run of two trials of which an earlier job has ended the first of two rungs, at epoch 4."""
    coordinator = make(2, world=2, epochs=(4, 8), retries=retries)
    steps: list[Allocation | Outcome] = []
    for serial in (0, 1):
        allocation = Allocation(
            serial=serial, evaluation=evaluation(serial, 0, 0, 4), ranks=(serial,)
        )
        steps += [allocation, ended(allocation, float(serial))]
    history = History(trials={0: trial(0), 1: trial(1)}, steps=steps, saved=sizes(saved))
    coordinator.replay(history)
    run = Run(coordinator, lambda work: float(work.trial.id))
    run.disk.update({trial_id: set(epochs) for trial_id, epochs in saved.items()})
    return run


def test_a_lost_state_takes_the_trial_to_an_earlier_epoch_and_says_so():
    run = resumed({0: frozenset({2, 3, 7})}).drive()
    (start,) = of_trial(run, 0)
    assert (start.evaluation.start, start.evaluation.stop, start.evaluation.rung) == (3, 8, 1)
    assert start.holders == ()
    assert run.notices == ["trial 0: its state after epoch 4 is lost; it trains again from epoch 4"]


def test_a_trial_without_any_state_starts_from_scratch_and_says_so():
    run = resumed({}).drive()
    (start,) = of_trial(run, 0)
    assert start.evaluation.start == 0
    assert run.notices == ["trial 0: its state after epoch 4 is lost; it trains again from epoch 1"]


def test_an_unreadable_state_is_no_failure_of_the_trial():
    run = resumed({0: frozenset({2, 3, 4})}, retries=0)
    starts: list[int] = []

    def value(work: Evaluation) -> float | str:
        starts.append(work.start)
        return "CheckpointError" if work.start > 2 else 0.5

    run.value = value
    run.drive()
    assert starts == [4, 3, 2]
    assert run.coordinator.status(0) is Status.COMPLETED
    assert len(run.notices) == 2
    assert run.reason == "completed"


@pytest.mark.parametrize("saved", [frozenset({4}), frozenset({3, 4})])
def test_an_error_of_this_name_from_elsewhere_is_a_failure(saved: frozenset[int]):
    """torch.utils.checkpoint has an error of the same name: no trial may be tried for ever."""
    run = resumed({0: saved}, retries=2)
    run.value = lambda work: "CheckpointError"
    run.drive()
    assert run.coordinator.status(0) is Status.FAILED
    assert len(of_trial(run, 0)) == 3 + len(saved)
    fresh = Run(make(1, retries=1, **ONE_RUNG), lambda work: "CheckpointError").drive()
    assert len(fresh.starts) == 2
    assert fresh.reason == "every trial failed"


@pytest.mark.parametrize(
    ("kinds", "attempts", "is_failed"),
    [
        (["RankLost"], 2, False),
        (["RankLost", "RankLost"], 2, True),
        (["RankLost", "ValueError"], 2, True),
        (["ValueError", "RankLost"], 1, True),
    ],
)
@pytest.mark.parametrize("retries", [0, 1])
def test_the_first_lost_rank_is_no_failure_of_the_trial(
    kinds: list[str], attempts: int, is_failed: bool, retries: int
):
    left = ["ValueError"] * retries + kinds

    def value(work: Evaluation) -> float | str:
        return left.pop(0) if left and work.trial.id == 0 else 1.0

    run = Run(make(2, world=1, retries=retries, **ONE_RUNG), value).drive()
    assert len(of_trial(run, 0)) == attempts + retries
    assert run.coordinator.status(0) is (Status.FAILED if is_failed else Status.COMPLETED)


def test_a_lost_rank_is_forgiven_once_per_trial_and_not_per_rung():
    value = failing((1, 0, "RankLost"), (1, 1, "RankLost"))
    run = Run(make(4), value).drive()
    assert [start.evaluation.rung for start in of_trial(run, 1)] == [0, 0, 1]
    assert run.coordinator.status(1) is Status.FAILED


def test_losses_elsewhere_are_always_forgiven():
    run = Run(make(4), failing((1, 0, "LossElsewhere"), times=3)).drive()
    assert [start.evaluation.rung for start in of_trial(run, 1)][:4] == [0] * 4
    assert run.coordinator.status(1) is not Status.FAILED


def test_holders_in_memory_make_it_a_failure():
    run = Run(make(4), failing((0, 1, "CheckpointError"))).drive()
    assert run.coordinator.status(0) is Status.FAILED


def test_what_a_resumed_trial_has_on_the_disk_is_deleted_when_it_fails():
    coordinator = make(2, world=1, **ONE_RUNG)
    start = Allocation(serial=0, evaluation=evaluation(0, stop=4), ranks=(0,))
    stopped = ended(start, None, Ending.INTERRUPTED, reports=(Report(2, {}, 1.0),))
    coordinator.replay(History(trials={0: trial(0)}, steps=[start, stopped], saved={0: {2: 1}}))
    run = Run(coordinator, lambda work: None if work.trial.id == 0 else 1.0)
    run.disk[0] = {2}
    run.drive()
    assert of_trial(run, 0)[0].evaluation.start == 2
    assert 0 not in run.disk


# Time.


def test_nothing_starts_that_cannot_end_an_epoch_in_time():
    coordinator = make(20, world=2, deadline=5.5, **ONE_RUNG)
    seconds = 2.0  # four epochs of half a second
    run = Run(coordinator, lambda work: 1.0, seconds=lambda allocation: seconds).drive()
    # At 0, 2 and 4; at 6 the time is over.
    assert len(run.starts) == 6
    assert run.reason == "time limit"
    coordinator = make(20, world=2, deadline=4.49, **ONE_RUNG)
    run = Run(coordinator, lambda work: 1.0, seconds=lambda allocation: seconds).drive()
    assert len(run.starts) == 4  # at 4 an epoch would end at 4.5
    assert run.reason == "time limit"
    assert coordinator.status(4) is Status.PENDING
    assert coordinator.status(19) is Status.PENDING  # was never drawn


def test_what_is_not_measured_yet_starts_before_the_deadline_only():
    assert len(Run(make(4, deadline=0.0), lambda work: 1.0).drive().starts) == 4
    late = Run(make(4, deadline=-1.0), lambda work: 1.0).drive()
    assert late.starts == []
    assert late.reason == "time limit"


def test_a_finished_experiment_is_completed_however_late_it_is():
    run = Run(make(4, world=4, deadline=0.5, **ONE_RUNG), lambda work: 1.0, seconds=unit).drive()
    assert run.now == 1.0
    assert run.reason == "completed"


def test_a_retry_does_not_start_too_late_either():
    coordinator = make(1, world=1, deadline=0.5, retries=5, **ONE_RUNG)
    run = Run(coordinator, lambda work: None).drive()
    assert len(run.starts) == 1
    assert run.reason == "time limit"
    assert coordinator.status(0) is Status.PENDING


def test_pace_is_that_of_the_trial_or_the_median():
    pace = Pace()
    assert pace.epoch_seconds(3) == 0.0
    for trial_id, seconds in enumerate((1.0, 9.0, 2.0)):
        # The first epoch has the start-up in it.
        reports = (Report(1, {}, 50.0), Report(2, {}, 50.0 + seconds))
        pace.learn(ended(evaluation(trial_id, stop=2), 1.0, reports=reports))
    assert [pace.epoch_seconds(trial_id) for trial_id in range(4)] == [1.0, 9.0, 2.0, 2.0]
    pace.learn(ended(evaluation(0, stop=2), None, Ending.FAILED))
    assert pace.epoch_seconds(0) == 1.0
    pace.learn(ended(evaluation(5), 1.0, reports=(Report(1, {}, 4.0),)))
    assert pace.epoch_seconds(5) == 4.0
