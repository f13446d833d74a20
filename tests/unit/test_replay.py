"""A job that goes on where another one was cut off decides as if nothing had happened."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpihpo.errors import InternalError
from mpihpo.history import History
from mpihpo.instructions import CloseRung
from mpihpo.records import Allocation, Ending, Evaluation, Outcome, Status
from tests.unit.virtual_clock import ListSearcher, Run, Step, jitter, make, sizes

Journal = Sequence[tuple[Step, dict[int, frozenset[int]]]]


def history_of(journal: Journal) -> History:
    steps = [step for step, _ in journal]
    allocations = [step.allocation if isinstance(step, Outcome) else step for step in steps]
    return History(
        trials={each.evaluation.trial.id: each.evaluation.trial for each in allocations},
        steps=steps,
        saved=sizes(journal[-1][1]) if journal else {},
    )


def values(
    trials: int, failures: dict[int, int], losses: Collection[int] = ()
) -> Callable[[Journal], Callable[..., object]]:
    """Objectives by trial and rung; trial i fails the first ``failures[i]`` times on its rung.

    The first failure of the trials in ``losses`` is that of a rank that died.
    """

    def after(journal: Journal) -> Callable[[Evaluation], float | str | None]:
        done = Counter(
            step.allocation.evaluation.trial.id
            for step, _ in journal
            if isinstance(step, Outcome) and step.ending is Ending.FAILED
        )

        def value(work: Evaluation) -> float | str | None:
            trial_id = work.trial.id
            if done[trial_id] < failures.get(trial_id, 0) + (trial_id in losses):
                done[trial_id] += 1
                is_loss = done[trial_id] == 1 and trial_id in losses
                return "RankLost" if is_loss else None
            return float((trial_id * 7 + work.rung * 3) % trials)

        return value

    return after


def resume(journal: Journal, value: object, seconds: object, /, trials: int, **options: object):
    """The next job: a run that has taken over what the journal tells, and has not begun."""
    coordinator = make(trials, **options)  # type: ignore[arg-type]
    coordinator.replay(history_of(journal))
    run = Run(coordinator, value, seconds)  # type: ignore[arg-type]
    run.disk.update(
        {trial_id: set(epochs) for trial_id, epochs in history_of(journal).saved.items()}
    )
    return run


def finished(journal: Journal) -> dict[tuple[int, int], float | None]:
    """Objective by trial and rung of everything that finished, which nothing does twice."""
    outcomes = [step for step, _ in journal if isinstance(step, Outcome)]
    done = [
        ((each.allocation.evaluation.trial.id, each.allocation.evaluation.rung), each.objective)
        for each in outcomes
        if each.ending is Ending.FINISHED
    ]
    assert len(dict(done)) == len(done)
    return dict(done)


def check_equal(journal: Journal, last: Run, whole: Run) -> None:
    assert last.rungs == whole.rungs
    assert finished(journal) == finished(whole.steps)
    serials = [step.serial for step, _ in journal if isinstance(step, Allocation)]
    assert len(set(serials)) == len(serials)
    best, expected = last.coordinator.best, whole.coordinator.best
    assert (best is None) == (expected is None)
    if best is not None and expected is not None:
        assert best.allocation.evaluation.trial == expected.allocation.evaluation.trial
        assert best.objective == expected.objective
    assert last.reason == whole.reason
    failed = Counter(
        step.allocation.evaluation.trial.id
        for step, _ in journal
        if isinstance(step, Outcome) and step.ending is Ending.FAILED
    )
    in_one_go = Counter(
        outcome.allocation.evaluation.trial.id
        for outcome in whole.outcomes
        if outcome.ending is Ending.FAILED
    )
    assert failed == in_one_go


@settings(max_examples=80, deadline=None)
@given(
    trials=st.integers(1, 12),
    factor=st.integers(2, 3),
    worlds=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    failures=st.dictionaries(st.integers(0, 11), st.integers(1, 3), max_size=4),
    losses=st.sets(st.integers(0, 11), max_size=4),
    retries=st.integers(0, 2),
    seed=st.integers(0, 10_000),
    is_graceful=st.booleans(),
    known=st.booleans(),
)
def test_cut_anywhere_and_again(
    trials: int,
    factor: int,
    worlds: list[int],
    failures: dict[int, int],
    losses: set[int],
    retries: int,
    seed: int,
    is_graceful: bool,
    known: bool,
):
    rng = random.Random(seed)
    value = values(trials, failures, losses)
    options = {"factor": factor, "retries": retries, "limit": trials if known else None}
    whole = Run(make(trials, world=3, **options), value([]), jitter(seed)).drive()  # type: ignore[arg-type]
    journal: list[tuple[Step, dict[int, frozenset[int]]]] = []
    for world in worlds[:-1]:
        run = resume(journal, value(journal), jitter(rng.random()), trials, world=world, **options)
        if is_graceful:
            run.drive(outcomes=rng.randint(0, 2 * trials))
            if not run.coordinator.done:
                run.interrupt("SIGTERM", lambda work: rng.randint(work.start, work.stop - 1))
            journal += run.steps
        else:
            run.drive()
            journal += run.steps[: rng.randint(0, len(run.steps))]
    last = resume(journal, value(journal), jitter(seed), trials, world=worlds[-1], **options)
    last.drive()
    assert not last.notices
    check_equal([*journal, *last.steps], last, whole)


def test_every_cut_of_one_journal():
    value = values(8, {2: 1})
    whole = Run(make(8, retries=1), value([]), jitter(1)).drive()
    for cut in range(len(whole.steps) + 1):
        journal = whole.steps[:cut]
        run = resume(journal, value(journal), jitter(2), 8, world=3, retries=1).drive()
        check_equal([*journal, *run.steps], run, whole)
        started = [step for step, _ in journal if isinstance(step, Allocation)]
        ended = [step for step, _ in journal if isinstance(step, Outcome)]
        if len(ended) < len(started):  # what was running then goes first
            unfinished = {(each.evaluation.trial.id, each.evaluation.rung) for each in started} - {
                (each.allocation.evaluation.trial.id, each.allocation.evaluation.rung)
                for each in ended
                if each.ending is Ending.FINISHED
            }
            first = {
                (each.evaluation.trial.id, each.evaluation.rung)
                for each in run.starts[: len(unfinished)]
            }
            assert first == unfinished


def test_every_cut_of_a_job_that_lost_ranks():
    """No trial lost a rank twice, so none failed: as if no rank had been lost."""
    undisturbed = Run(make(8), values(8, {})([])).drive()
    whole = Run(make(8), values(8, {})([]), jitter(1)).drive(outcomes=2)
    whole.lose([3]).drive(outcomes=3)
    whole.readmit(3).drive(outcomes=3)
    whole.lose([1, 2]).drive()
    lost = [each for each in whole.outcomes if each.ending is Ending.FAILED]
    assert len(lost) >= 2
    assert whole.rungs == undisturbed.rungs
    for cut in range(len(whole.steps) + 1):
        journal = whole.steps[:cut]
        run = resume(journal, values(8, {})(journal), jitter(2), 8, world=3).drive()
        assert run.rungs == undisturbed.rungs
        assert run.reason == "completed"
        assert finished([*journal, *run.steps]) == finished(undisturbed.steps)
        again = resume(journal, values(8, {})(journal), jitter(2), 8, world=3).drive()
        assert again.log == run.log


@pytest.mark.parametrize(("before", "is_failed"), [(0, False), (1, True)])
def test_a_rank_that_was_lost_before_the_resume_counts(before: int, is_failed: bool):
    options = {"world": 2, "scheduler": "none", "policy": "fixed"}
    run = Run(make(2, **options), lambda work: 1.0).drive(outcomes=0)
    if before:
        run.lose([run.running[0].leader])
    run = resume(run.steps, lambda work: 1.0, jitter(0), 2, **options).drive(outcomes=0)
    run.lose([next(each.leader for each in run.running if each.evaluation.trial.id == 0)])
    run.drive()
    assert run.coordinator.status(0) is (Status.FAILED if is_failed else Status.COMPLETED)
    assert run.coordinator.status(1) is Status.COMPLETED


def test_an_interrupted_trial_goes_on_after_its_last_epoch():
    run = Run(make(2, world=2, scheduler="none", epochs=(1, 8)), lambda work: 1.0)
    run.drive(outcomes=0)
    run.interrupt("SIGTERM", lambda work: 3 + work.trial.id)
    assert run.reason == "SIGTERM"
    again = resume(
        run.steps, lambda work: 1.0, jitter(0), 2, world=1, scheduler="none", epochs=(1, 8)
    ).drive()
    assert [(a.evaluation.trial.id, a.evaluation.start) for a in again.starts] == [(0, 3), (1, 4)]
    assert all(start.holders == () for start in again.starts)
    assert again.reason == "completed"


def test_interrupted_twice_it_goes_on_after_the_later_epoch():
    options = {"world": 1, "scheduler": "none", "epochs": (1, 8)}
    journal: list[tuple[Step, dict[int, frozenset[int]]]] = []
    for reached in (3, 5):
        run = resume(journal, lambda work: 1.0, jitter(0), 1, **options)
        run.drive(outcomes=0)
        run.interrupt("SIGTERM", lambda work, reached=reached: reached)
        journal += run.steps
    last = resume(journal, lambda work: 1.0, jitter(0), 1, **options).drive()
    assert [start.evaluation.start for start in last.starts] == [5]


def test_a_finished_run_has_nothing_left_to_do():
    whole = Run(make(8), lambda work: float(work.trial.id)).drive()
    again = resume(whole.steps, None, None, 8, world=2).drive()
    assert again.starts == []
    assert again.rungs == whole.rungs
    assert again.reason == "completed"
    assert again.coordinator.best is not None
    assert again.coordinator.best.allocation.evaluation.trial.id == 0
    failed = Run(make(3), lambda work: None).drive()
    assert resume(failed.steps, None, None, 3, world=2).drive().reason == "every trial failed"


@pytest.mark.parametrize("more", [1, 8])
def test_more_trials_join_and_nothing_is_repeated(more: int):
    def value(work: Evaluation) -> float:
        return float(-work.trial.id)  # the later the better

    first = Run(make(8), value).drive()
    options: dict[str, object] = {"world": 4}
    both = resume(first.steps, value, jitter(0), 8 + more, **options).drive()
    repeated = finished(first.steps).keys() & finished(both.steps).keys()
    assert not repeated
    alone = Run(make(8 + more), value).drive()
    assert [result.promoted for result in both.rungs] == [r.promoted for r in alone.rungs]
    assert both.rungs == alone.rungs
    assert both.coordinator.best is not None
    assert both.coordinator.best.allocation.evaluation.trial.id == 7 + more


def test_a_stopped_trial_that_more_trials_promote_trains_from_scratch():
    def value(work: Evaluation) -> float:
        return float(work.trial.id)  # the earlier the better

    first = Run(make(4), value).drive()  # trials 0 and 1 went on
    assert set(first.disk) == {0}
    both = resume(first.steps, value, jitter(0), 8, world=4).drive()
    promoted = [start for start in both.starts if start.evaluation.rung == 1]
    assert {start.evaluation.trial.id for start in promoted} == {2, 3}
    assert all(start.evaluation.start == 0 for start in promoted)
    text = "its state after epoch 1 is lost; it trains again from epoch 1"
    assert {f"trial {trial_id}: {text}" for trial_id in (2, 3)} <= set(both.notices)
    assert both.rungs == Run(make(8), value).drive().rungs


def test_fewer_trials_leave_the_others_pending():
    run = Run(make(8, world=2), lambda work: 1.0)
    run.drive(outcomes=3)
    again = resume(run.steps, lambda work: 1.0, jitter(0), 2, world=2).drive()
    assert again.reason == "completed"
    assert again.coordinator.status(3) is Status.PENDING


@pytest.mark.parametrize("kind", [Allocation, Outcome])
def test_any_lost_entry_costs_that_evaluation_only(kind: type):
    value = values(8, {1: 1, 5: 2})
    whole = Run(make(8, retries=1), value([]), jitter(3)).drive()
    for lost, (step, _) in enumerate(whole.steps):
        if not isinstance(step, kind):
            continue
        journal = [*whole.steps[:lost], *whole.steps[lost + 1 :]]
        run = resume(journal, value(journal), jitter(2), 8, world=3, retries=1).drive()
        assert run.rungs == whole.rungs
        assert run.reason == "completed"
        if kind is Allocation:
            assert run.starts == []
        else:
            assert isinstance(step, Outcome)
            done = step.allocation.evaluation
            if step.ending is Ending.FINISHED:
                assert {(a.evaluation.trial.id, a.evaluation.rung) for a in run.starts} == {
                    (done.trial.id, done.rung)
                }


def test_a_retry_that_was_due_is_made_even_when_the_start_is_lost():
    run = Run(make(2, world=1, retries=1, scheduler="none"), values(2, {0: 1})([]))
    run.drive(outcomes=1)
    journal = [entry for entry in run.steps if isinstance(entry[0], Outcome)]
    again = resume(
        journal, lambda work: 1.0, jitter(0), 2, world=1, retries=1, scheduler="none"
    ).drive()
    assert again.coordinator.status(0) is Status.COMPLETED
    once = resume(
        journal,
        lambda work: None if work.trial.id == 0 else 1.0,
        jitter(0),
        2,
        world=1,
        retries=1,
        scheduler="none",
    ).drive()
    assert [start.evaluation.trial.id for start in once.starts] == [0, 1]
    assert once.coordinator.status(0) is Status.FAILED


def test_what_the_searcher_says_today_does_not_change_a_trial_on_record():
    class Other(ListSearcher):
        def ask(self, trial_id: int) -> dict[str, int] | None:
            return {"x": 100 + trial_id} if trial_id < self.size else None

    run = Run(make(4, world=1), lambda work: 1.0)
    run.drive(outcomes=2)
    again = resume(run.steps, lambda work: 1.0, jitter(0), 4, world=1, searcher=Other(4)).drive()
    configs = {a.evaluation.trial.id: a.evaluation.trial.config for a in again.starts}
    assert configs[2] == {"x": 2}  # started, not ended
    assert configs[3] == {"x": 103}


def test_replaying_after_the_begin_is_refused():
    coordinator = make(2)
    coordinator.begin(0.0)
    with pytest.raises(InternalError, match="after it began"):
        coordinator.replay(History(trials={}, steps=[], saved={}))


def test_rungs_of_the_earlier_job_are_closed_before_anything_starts():
    whole = Run(make(8), lambda work: float(work.trial.id)).drive()
    cut = next(i for i, (step, _) in enumerate(whole.steps) if getattr(step, "serial", 0) == 9)
    run = resume(whole.steps[:cut], lambda work: float(work.trial.id), jitter(0), 8, world=2)
    instructions = run.coordinator.begin(0.0)
    assert isinstance(instructions[0], CloseRung)
