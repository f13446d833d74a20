"""Ranks that are lost and come back, between and under evaluations."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpihpo.allocation import Topology
from mpihpo.errors import InternalError
from mpihpo.instructions import TOO_FEW_RANKS, Drop, Finish, Notice, Save, Start
from mpihpo.records import Ending, Evaluation, Outcome, Status
from tests.unit.virtual_clock import ListSearcher, Run, ended, jitter, make

ENDED = {Status.COMPLETED, Status.STOPPED, Status.FAILED}


def by_id(work: Evaluation) -> float:
    """The earlier a trial, the better."""
    return float(work.trial.id)


def at_once(outcome: Outcome) -> float:
    return 0.0


def saving(coordinator: object, value: object = by_id, /, **options: object) -> Run:
    """A run with a disk that is as fast as one wishes."""
    options = {"state_bytes": 1, "save_seconds": at_once, **options}
    return Run(coordinator, value, **options)  # type: ignore[arg-type]


def starts_of(run: Run, trial_id: int) -> list[tuple[int, int]]:
    """Rung and first epoch of every start of a trial."""
    evaluations = [start.evaluation for start in run.starts]
    return [(each.rung, each.start) for each in evaluations if each.trial.id == trial_id]


# A rank under an evaluation.


def test_the_trial_of_a_lost_rank_is_tried_again_and_its_first_loss_does_not_count():
    searcher = ListSearcher(4)
    run = saving(make(4, world=4, searcher=searcher)).drive(outcomes=0)
    assert run.starts[2].ranks == (2,)
    run.lose([2])
    assert run.coordinator.snapshot().ranks == 3
    run.drive()
    assert starts_of(run, 2) == [(0, 0), (0, 0)]
    assert run.coordinator.status(2) is Status.STOPPED
    assert run.rungs[0].failed == 0
    assert run.reason == "completed"
    assert [outcome.ending for outcome in searcher.told] == [Ending.FINISHED] * 8


@pytest.mark.parametrize("retries", [0, 1])
def test_a_second_loss_counts_as_a_failure(retries: int):
    run = saving(make(2, world=4, scheduler="none", policy="fixed", ranks=1, retries=retries))
    run.drive(outcomes=0)
    for _ in range(2 + retries):
        (allocation,) = (each for each in run.running if each.evaluation.trial.id == 0)
        run.lose([allocation.leader])
    assert starts_of(run, 0) == [(0, 0)] * (2 + retries)
    assert run.drive().coordinator.status(0) is Status.FAILED
    assert run.coordinator.status(1) is Status.COMPLETED


def test_other_trials_may_lose_a_rank_too():
    run = saving(make(3, world=6, scheduler="none", policy="fixed")).drive(outcomes=0)
    run.lose([0, 1, 2]).drive()
    assert run.coordinator.snapshot().counts == {Status.COMPLETED: 3}
    assert {rank for start in run.starts[3:] for rank in start.ranks} == {3, 4, 5}


def test_a_rank_that_was_set_aside_fails_its_trial():
    run = saving(make(2, world=2, scheduler="none")).drive(outcomes=0)
    run.lose([1], "TrialTimeout").drive()
    assert run.coordinator.status(1) is Status.FAILED
    assert run.coordinator.status(0) is Status.COMPLETED
    assert len(run.starts) == 2


def test_widths_follow_the_ranks_that_are_left():
    run = saving(make(8, world=4), by_id).drive(outcomes=8)
    assert {len(each.ranks) for each in run.running} == {2}
    run.lose([0, 1], "TrialTimeout")
    run.drive()
    last = run.starts[-1]
    assert (last.evaluation.rung, last.ranks) == (3, (2, 3))


# States.


def test_a_state_that_only_lost_ranks_held_is_read_from_the_disk():
    run = saving(make(4, world=4)).drive(outcomes=3)
    assert run.memory[1] == {1: 1}
    run.lose([1])
    assert Drop(1, (1,)) in run.log
    run.drive()
    (_, promoted) = (each for each in run.starts if each.evaluation.trial.id == 1)
    assert (promoted.evaluation.start, promoted.holders) == (1, ())
    assert run.notices == []


def test_a_state_that_is_nowhere_is_trained_again_and_that_is_said():
    run = Run(make(4, world=4), by_id, state_bytes=1).drive(outcomes=3)
    run.disk.clear()  # there is none
    run.lose([1]).drive()
    assert starts_of(run, 1) == [(0, 0), (1, 0)]
    text = "its state after epoch 1 is lost; it trains again from epoch 1"
    assert run.notices == [f"trial 1: {text}"]
    assert run.reason == "completed"


def test_the_copy_on_another_node_is_used():
    run = Run(make(2, world=Topology.even(4, 2), ranks=3), by_id, state_bytes=1)
    run.drive(outcomes=1)
    assert run.memory[0] == run.memory[2] == {0: 1}
    run.disk.clear()
    run.lose([0]).drive()
    promoted = run.starts[-3]
    assert (promoted.evaluation.rung, promoted.evaluation.start) == (1, 1)
    assert (promoted.holders, promoted.ranks) == ((2,), (2, 1, 3))
    assert run.notices == []


def test_a_trial_with_nothing_attached_goes_on_wherever_it_was():
    run = saving(make(4, world=4), state_bytes=0).drive(outcomes=3)
    run.lose([1]).drive()
    assert starts_of(run, 1) == [(0, 0), (1, 1)]
    assert run.notices == []


def test_the_checkpoint_of_the_best_trial_comes_from_a_rank_that_is_left():
    run = saving(make(1, world=2, epochs=(1, 1))).drive(outcomes=0)
    coordinator, (running,) = run.coordinator, run.running
    assert running.ranks == (0, 1)
    assert coordinator.stop("SIGTERM", 0.5) == []
    run.drive()
    assert run.log[-2:] == [Save(0, 0), Finish("completed")]


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_the_best_state_may_be_lost_with_its_rank(is_on_disk: bool):
    run = Run(
        make(2, world=2, epochs=(1, 1)),
        by_id,
        lambda allocation: 1.0 + allocation.evaluation.trial.id,
        state_bytes=1,
        save_seconds=at_once if is_on_disk else lambda outcome: 100.0,
    )
    run.drive(outcomes=1)
    run.lose([0]).drive()
    assert run.reason == "completed"
    if is_on_disk:
        assert run.log[-2] == Save(0, 1)
    else:
        text = "trial 0, the best one: its state after epoch 1 is lost"
        assert run.log[-2] == Notice(text)


# The end.


def test_with_all_ranks_lost_the_job_ends():
    run = saving(make(4, world=2)).drive(outcomes=3)
    run.lose([0, 1])
    assert run.reason == TOO_FEW_RANKS
    (text,) = (each for each in run.notices if TOO_FEW_RANKS in each)
    assert text.startswith(f"nothing more is started: {TOO_FEW_RANKS}: allocation.ranks: 1 ranks")
    assert run.coordinator.snapshot().ranks == 0
    assert sum(run.coordinator.snapshot().counts.values()) == 4


def test_with_too_few_ranks_for_any_trial_what_runs_goes_on_to_its_end():
    run = saving(make(8, world=4, ranks=2, policy="fixed")).drive(outcomes=0)
    run.lose([3])
    assert not run.coordinator.done
    assert [each.ranks for each in run.running] == [(0, 1)]
    run.lose([2])  # two are left, which is enough
    run.drive()
    assert run.reason == "completed"
    run = saving(make(8, world=4, ranks=3, policy="fixed")).drive(outcomes=0)
    run.lose([3])
    assert [each.ranks for each in run.running] == [(0, 1, 2)]
    run.lose([0]).drive()
    assert run.reason == TOO_FEW_RANKS


def test_all_ranks_lost_with_the_last_outcome_is_completed():
    run = saving(make(1, world=1, epochs=(1, 1))).drive(outcomes=0)
    (allocation,) = run.running
    outcome = ended(allocation, 1.0)
    last = run.coordinator.tell(outcome, 1.0, lost=[0])
    assert last[-1] == Finish("completed")
    assert not [each for each in last if TOO_FEW_RANKS in str(each)]


def test_nothing_comes_after_the_end():
    run = saving(make(2, world=2)).drive()
    assert run.coordinator.lose([0], run.now) == []
    assert run.coordinator.readmit(0, run.now) == []
    assert run.coordinator.lose([0, 1], run.now) == []
    assert run.coordinator.saved(0, 8, 10**9) == []
    assert run.coordinator.done


# Coming back.


def test_a_rank_that_is_back_trains_again():
    run = saving(make(8, world=2)).drive(outcomes=2)
    run.lose([1], "TrialTimeout").drive(outcomes=1)
    assert run.coordinator.snapshot().ranks == 1
    run.readmit(1)
    assert run.coordinator.snapshot().ranks == 2
    assert run.starts[-1].ranks == (1,)
    run.drive()
    assert run.reason == "completed"
    assert run.starts[-1].ranks == (0, 1)


def test_lost_is_lost_however_often_it_is_said():
    run = saving(make(8, world=4)).drive(outcomes=0)
    first = run.running[0]
    run.lose([0, 1], at_once=True)
    assert run.coordinator.snapshot().ranks == 2
    assert run.coordinator.lose([0, 1], run.now) == []
    assert first.ranks == (0,)
    assert run.drive().reason == "completed"
    with pytest.raises(InternalError, match="rank 9 is lost but never trained"):
        run.coordinator.lose([9], run.now)


def test_what_is_not_lost_cannot_come_back():
    coordinator = make(4, world=2)
    coordinator.begin(0.0)
    with pytest.raises(InternalError, match="its evaluation has not ended"):
        coordinator.readmit(1, 0.0)
    coordinator.lose([1], 0.0)
    with pytest.raises(InternalError, match="its evaluation has not ended"):
        coordinator.readmit(1, 0.0)
    coordinator = make(1, world=2, policy="fixed")
    coordinator.begin(0.0)
    with pytest.raises(InternalError, match="rank 1 is back but was not lost"):
        coordinator.readmit(1, 0.0)


def test_utilisation_counts_ranks_while_they_are_there():
    run = Run(make(4, world=4, scheduler="none", policy="fixed"), by_id)
    run.drive(outcomes=4)
    assert run.coordinator.snapshot().utilisation == 1.0
    coordinator = make(5, world=4, scheduler="none", policy="fixed")
    starts = [each.allocation for each in coordinator.begin(0.0) if isinstance(each, Start)]
    for allocation in starts[1:]:
        coordinator.tell(ended(allocation, 1.0), 10.0)
    coordinator.lose([2, 3], 10.0)
    coordinator.tell(ended(starts[0], 1.0), 20.0)
    assert coordinator.snapshot().utilisation == pytest.approx(60 / 60)


# Anything.


def steady(work: Evaluation) -> float | None:
    """Depends on trial and epoch only; one in ten fails, many are equal."""
    digest = hashlib.sha256(f"{work.trial.id}:{work.stop}".encode()).digest()
    return None if digest[0] % 10 == 0 else digest[1] % 16 / work.stop


def disturb(run: Run, rng: random.Random, world: int, *, spare: int = 0) -> None:
    """Lose or readmit some ranks, now."""
    there = [rank for rank in range(world) if rank not in run.lost]
    if run.lost and rng.random() < 0.4:
        run.readmit(rng.choice(sorted(run.lost)))
    elif len(there) > spare:
        kind = rng.choice(["RankLost", "TrialTimeout"])
        ranks = rng.sample(there, rng.randint(1, len(there) - spare))
        run.lose(ranks, kind, at_once=rng.random() < 0.5)


schedules = st.fixed_dictionaries(
    {
        "trials": st.integers(1, 16),
        "factor": st.integers(2, 3),
        "ranks": st.integers(1, 3),
        "policy": st.sampled_from(["fixed", "doubling"]),
        "scheduler": st.sampled_from(["successive_halving", "none"]),
        "retries": st.integers(0, 2),
        "state_bytes": st.one_of(st.none(), st.integers(1, 40)),
    }
)


def play(schedule: dict[str, object], nodes: list[int], seed: int, spare: int) -> Run:
    """A run during which ranks come and go at moments that the seed says."""
    rng = random.Random(seed)
    topology = Topology(tuple(node for node, size in enumerate(nodes) for _ in range(size)))
    schedule = {**schedule, "ranks": min(schedule["ranks"], topology.size)}  # type: ignore[type-var]
    run = Run(
        make(world=topology, **schedule),  # type: ignore[arg-type]
        steady,
        jitter(seed),
        state_bytes=rng.choice([0, 1, 2]),
        save_seconds=lambda outcome: rng.choice([0.0, 0.5, 3.0]),
        budget=schedule["state_bytes"],  # type: ignore[arg-type]
    )
    run.drive(outcomes=0)
    while not run.coordinator.done and len(run.outcomes) < 500:
        run.drive(outcomes=rng.randint(0, 3))
        if not run.coordinator.done:
            disturb(run, rng, topology.size, spare=spare)
    return run.drive()


@settings(max_examples=150, deadline=None)
@given(
    schedule=schedules,
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
)
def test_whatever_is_lost_the_job_ends_and_every_trial_is_accounted_for(
    schedule: dict[str, object], nodes: list[int], seed: int
):
    run = play(schedule, nodes, seed, spare=0)
    assert isinstance(run.log[-1], Finish)
    counts = run.coordinator.snapshot().counts
    assert Status.RUNNING not in counts
    if run.reason == TOO_FEW_RANKS:
        assert run.lost
    else:
        assert run.reason in ("completed", "every trial failed")
        assert set(counts) <= ENDED
        assert sum(counts.values()) == schedule["trials"]
    started = {start.evaluation.trial.id for start in run.starts}
    assert started <= set(range(sum(counts.values())))
    assert len(run.outcomes) == len(run.starts)
    last = {each.allocation.evaluation.trial.id: each for each in run.outcomes}
    for trial_id in started:
        has_failed = run.coordinator.status(trial_id) is Status.FAILED
        assert not has_failed or last[trial_id].ending is Ending.FAILED


@settings(max_examples=40, deadline=None)
@given(
    schedule=schedules,
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
)
def test_equal_losses_give_equal_instructions(
    schedule: dict[str, object], nodes: list[int], seed: int
):
    first, second = (play(schedule, nodes, seed, spare=0) for _ in range(2))
    assert first.log == second.log


@settings(max_examples=60, deadline=None)
@given(
    trials=st.integers(1, 16),
    factor=st.integers(2, 3),
    world=st.integers(2, 6),
    seed=st.integers(0, 10_000),
)
def test_results_do_not_depend_on_ranks_that_are_lost_between_evaluations(
    trials: int, factor: int, world: int, seed: int
):
    """Lost while idle or under a trial for the first time: no trial fails for it."""
    rng = random.Random(seed)
    whole = Run(make(trials, factor=factor), steady).drive()
    run = Run(
        make(trials, world=world, factor=factor),
        steady,
        jitter(seed),
        state_bytes=1,
        save_seconds=lambda outcome: rng.choice([0.0, 5.0]),
    )
    bereaved: set[int] = set()
    run.drive(outcomes=0)
    while not run.coordinator.done:
        run.drive(outcomes=rng.randint(1, 3))
        under = {rank: each.evaluation.trial.id for each in run.running for rank in each.ranks}
        choice = [
            rank
            for rank in range(world)
            if rank not in run.lost and under.get(rank) not in bereaved
        ]
        if run.lost and rng.random() < 0.5 and not run.coordinator.done:
            run.readmit(rng.choice(sorted(run.lost)))
        elif choice and len(run.lost) < world - 1 and not run.coordinator.done:
            rank = rng.choice(choice)
            bereaved.add(under.get(rank, -1))
            run.lose([rank])
    run.drive()
    assert run.rungs == whole.rungs
    assert run.reason == whole.reason
