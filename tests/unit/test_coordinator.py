from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mpihpo.agenda import trial_seed
from mpihpo.allocation import AllocationSettings, Topology, build_policy
from mpihpo.coordinator import Coordinator
from mpihpo.errors import AllocationError, ExperimentError, InternalError
from mpihpo.instructions import CloseRung, Drop, Finish, Save, Start
from mpihpo.records import Ending, Evaluation, RungResult, Status, TrialRecord
from mpihpo.schedule import Propose
from tests.unit.virtual_clock import LOSS, ListSearcher, Run, ended, evaluation, jitter, make

NINE = (5.0, 1.0, 8.0, 3.0, 9.0, 2.0, 7.0, 4.0, 6.0)
"""Losses by trial: the best are 1, 5, 3."""
SIXTEEN = tuple(float(i * 7 % 16) for i in range(16))
"""Losses by trial: the best are 0, 7, 14, 5, 12, 3, 10, 1."""


def by_trial(losses: Sequence[float | None]) -> Callable[[Evaluation], float | None]:
    return lambda work: losses[work.trial.id]


def test_nine_trials_in_thirds_on_four_ranks() -> None:
    run = Run(make(9, factor=3, epochs=(1, 9)), by_trial(NINE)).drive()
    assert run.placed() == [
        (0, 0, (0,)),
        (0, 1, (1,)),
        (0, 2, (2,)),
        (0, 3, (3,)),
        (0, 4, (0,)),  # the second wave
        (0, 5, (1,)),
        (0, 6, (2,)),
        (0, 7, (3,)),
        (0, 8, (0,)),  # the third wave
        (1, 1, (1, 0, 2, 3)),  # needs three ranks; the fourth would be left over
        (1, 5, (1, 0, 2, 3)),
        (1, 3, (3, 0, 1, 2)),
        (2, 1, (1, 0, 2, 3)),  # nine ranks are capped by the world
    ]
    assert run.rungs == [
        RungResult(rung=0, start=0, stop=1, evaluated=9, failed=0, promoted=(1, 5, 3), best=1.0),
        RungResult(rung=1, start=1, stop=3, evaluated=3, failed=0, promoted=(1,), best=1.0),
        RungResult(rung=2, start=3, stop=9, evaluated=1, failed=0, promoted=(), best=1.0),
    ]
    assert run.log[-2:] == [Save(1, 1), Finish("completed")]
    assert run.remembered() == {1: 1}
    assert run.coordinator.done


def test_sixteen_trials_in_halves_on_four_ranks() -> None:
    run = Run(make(16), by_trial(SIXTEEN)).drive()
    assert run.placed() == [
        *((0, trial, (trial % 4,)) for trial in range(16)),  # four waves
        (1, 0, (0, 1)),  # the two best wherever their states are
        (1, 7, (3, 2)),
        (1, 14, (0, 1)),  # its state is on rank 2, which is busy
        (1, 5, (2, 3)),
        (1, 12, (0, 1)),
        (1, 3, (3, 2)),
        (1, 10, (0, 1)),
        (1, 1, (2, 3)),
        (2, 0, (0, 1, 2, 3)),
        (2, 7, (3, 0, 1, 2)),
        (2, 14, (0, 1, 2, 3)),
        (2, 5, (2, 0, 1, 3)),
        (3, 0, (0, 1, 2, 3)),  # eight ranks are capped by the world
        (3, 7, (3, 0, 1, 2)),
    ]
    assert [rung.promoted for rung in run.rungs] == [
        (0, 7, 14, 5, 12, 3, 10, 1),
        (0, 7, 14, 5),
        (0, 7),
        (),
    ]
    assert [rung.stop for rung in run.rungs] == [1, 2, 4, 8]
    assert run.remembered() == {0: 1}


def test_instructions_of_one_small_experiment() -> None:
    run = Run(make(2, world=2, epochs=(1, 2)), by_trial((2.0, 1.0))).drive()
    assert [type(entry) for entry in run.log] == [
        Start,
        Start,
        CloseRung,
        Drop,
        Start,
        CloseRung,
        Save,
        Finish,
    ]
    assert run.log[3] == Drop(0, (0,), has_ended=True)
    promoted = run.starts[2]
    assert promoted.evaluation.trial == TrialRecord(id=1, config={"x": 1}, seed=trial_seed(17, 1))
    assert (promoted.serial, promoted.ranks) == (2, (1, 0))
    assert (promoted.holders, promoted.keepers) == ((1,), (1,))


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7, 13])
def test_no_rank_is_idle_while_an_evaluation_waits(world: int) -> None:
    run = Run(make(16, world=world), by_trial(SIXTEEN), jitter(world)).drive()
    whole_rungs = {16, 24, 28, 30}
    for idle, started in run.idle:
        assert idle == 0 or started in whole_rungs
    assert len(run.starts) == 30


def test_world_of_one() -> None:
    run = Run(make(4, world=1), by_trial((3.0, 1.0, 2.0, 0.0))).drive()
    assert {allocation.ranks for allocation in run.starts} == {(0,)}
    assert run.rungs[0].promoted == (3, 1)
    assert run.coordinator.best is not None
    assert run.coordinator.best.allocation.evaluation.trial.id == 3


def test_fixed_leaves_the_leftover_idle() -> None:
    run = Run(make(4, world=5, policy="fixed", ranks=2), by_trial(SIXTEEN)).drive()
    assert {len(allocation.ranks) for allocation in run.starts} == {2}
    assert run.idle[0] == (1, 2)


def test_max_ranks_is_never_exceeded() -> None:
    run = Run(make(8, world=8, max_ranks=3), by_trial(SIXTEEN), jitter(1)).drive()
    widths = [len(allocation.ranks) for allocation in run.starts]
    assert widths[:8] == [1] * 8
    assert max(widths) == 3
    assert set(widths[12:]) == {3}


def test_surplus_ranks_at_the_first_rung() -> None:
    run = Run(make(3, world=8), by_trial(SIXTEEN)).drive()
    assert [len(allocation.ranks) for allocation in run.starts[:3]] == [3, 3, 2]


def test_dedicated_coordinator_never_trains() -> None:
    run = Run(make(8, world=5, training_ranks=range(1, 5)), by_trial(SIXTEEN), jitter(2)).drive()
    assert {rank for allocation in run.starts for rank in allocation.ranks} == {1, 2, 3, 4}
    assert run.coordinator.snapshot().ranks == 4


def test_two_nodes() -> None:
    run = Run(make(8, world=Topology.even(8, 2)), by_trial(SIXTEEN)).drive()
    node_of = Topology.even(8, 2).node_of
    for allocation in run.starts:
        spanned = {node_of[rank] for rank in allocation.ranks}
        assert len(spanned) == (2 if len(allocation.ranks) > 4 else 1)
        assert {node_of[rank] for rank in allocation.keepers} == spanned
        assert len(allocation.keepers) == len(spanned)
    last = run.starts[-1]
    assert (last.evaluation.rung, len(last.ranks)) == (3, 8)


def test_states_stay_where_they_are_when_ranks_allow() -> None:
    run = Run(make(8, world=8), by_trial(SIXTEEN)).drive()
    moved = [a for a in run.starts if a.holders and a.leader not in a.holders]
    assert moved == []
    assert len(run.starts) == 8 + 4 + 2 + 1


def test_failing_trials_do_not_stop_the_others() -> None:
    losses = [None if i % 3 == 0 else SIXTEEN[i] for i in range(16)]
    run = Run(make(16), by_trial(losses), jitter(3)).drive()
    assert run.rungs[0].failed == 6
    assert run.rungs[0].promoted == (7, 14, 5, 10, 1, 8, 13, 4)
    assert run.reason == "completed"
    assert run.coordinator.status(0) is Status.FAILED
    assert run.coordinator.status(7) is Status.COMPLETED
    assert run.remembered() == {7: 1}


def test_failure_at_a_higher_rung_drops_the_older_state() -> None:
    # Trial 0 fails at the second rung, where trial 1 finished before.
    def value(work: Evaluation) -> float | None:
        return None if (work.trial.id, work.rung) == (0, 1) else float(work.trial.id)

    run = Run(
        make(4, world=2, epochs=(1, 4), max_ranks=1),
        value,
        lambda allocation: 2.0 - allocation.evaluation.trial.id,
    )
    run.drive(outcomes=5)
    assert run.coordinator.best is not None
    assert run.coordinator.best.allocation.evaluation.trial.id == 1
    assert 0 in run.remembered()
    run.drive(outcomes=1)
    assert run.coordinator.status(0) is Status.FAILED
    assert 0 not in run.remembered()
    assert run.rungs[1].promoted == (1,)
    assert run.drive().reason == "completed"


def test_state_of_the_best_trial_survives_its_failure() -> None:
    run = Run(
        make(2, world=2, epochs=(1, 2)),
        lambda work: None if work.rung else float(work.trial.id),
    ).drive()
    assert run.coordinator.status(0) is Status.FAILED
    assert run.log[-2:] == [Save(0, 0), Finish("completed")]
    assert run.memory[0] == {0: 1}


def test_every_trial_failed() -> None:
    run = Run(make(5), lambda work: None, jitter(4)).drive()
    assert run.log[-1] == Finish("every trial failed")
    assert not any(isinstance(entry, Save) for entry in run.log)
    assert run.rungs == [
        RungResult(rung=0, start=0, stop=1, evaluated=5, failed=5, promoted=(), best=None)
    ]
    assert run.coordinator.best is None


def test_exhausted_grid_closes_its_rung_once() -> None:
    run = Run(make(5, limit=None), by_trial(SIXTEEN), jitter(5)).drive()
    assert [rung.evaluated for rung in run.rungs] == [5, 2, 1, 1]


def test_empty_searcher_ends_at_once() -> None:
    assert make(0, limit=None).begin(0.0) == [Finish("every trial failed")]


def test_none_trains_all_to_the_end() -> None:
    run = Run(make(6, scheduler="none", policy="fixed"), by_trial(SIXTEEN), jitter(6)).drive()
    assert [(a.evaluation.start, a.evaluation.stop) for a in run.starts] == [(0, 8)] * 6
    assert len(run.rungs) == 1
    assert run.remembered() == {0: 1}


def test_stop_lets_the_running_ones_end() -> None:
    run = Run(make(16), by_trial(SIXTEEN)).drive(outcomes=6)
    assert run.coordinator.stop("time limit", run.now) == []
    assert run.coordinator.stop("another", run.now) == []
    run.drive()
    assert len(run.starts) == 10
    assert run.log[-2:] == [Save(0, 0), Finish("time limit")]
    assert run.coordinator.stop("too late", run.now) == []
    assert run.coordinator.status(3) is Status.PARKED


def test_interrupted_trials_keep_the_state_they_had() -> None:
    run = Run(make(4, world=2), by_trial(SIXTEEN)).drive(outcomes=4)
    (running,) = run.coordinator.snapshot().running
    assert running.evaluation.rung == 1
    run.interrupt("signal")
    trial_id = running.evaluation.trial.id
    assert run.coordinator.status(trial_id) is Status.PARKED
    assert run.memory[running.holders[0]][trial_id] == 1
    assert len(run.rungs) == 1
    assert run.reason == "signal"


def test_stop_with_nothing_running() -> None:
    coordinator = make(4)
    assert coordinator.stop("signal", 0.0) == [Finish("signal")]
    assert coordinator.done
    with pytest.raises(InternalError, match="after its end"):
        coordinator.begin(0.0)


def test_work_that_is_complete_is_not_called_stopped() -> None:
    run = Run(make(1, epochs=(1, 1)), by_trial((1.0,)))
    run.obey(run.coordinator.begin(0.0))
    run.obey(run.coordinator.stop("time limit", 0.5))
    assert run.drive().reason == "completed"


def test_snapshot() -> None:
    run = Run(make(8, world=3), by_trial(SIXTEEN)).drive(outcomes=4)
    snapshot = run.coordinator.snapshot()
    assert (snapshot.rung, snapshot.busy_ranks, snapshot.ranks) == (0, 3, 3)
    assert snapshot.counts == {Status.RUNNING: 3, Status.PARKED: 4}
    assert [a.evaluation.trial.id for a in snapshot.running] == [4, 5, 6]
    assert snapshot.utilisation == 1.0
    assert snapshot.best is not None
    assert snapshot.best.objective == 0.0
    run.drive()
    assert run.coordinator.snapshot().counts == {Status.COMPLETED: 1, Status.STOPPED: 7}
    # Eight units of one rank, then rungs that keep all three ranks busy.
    assert 0.9 < run.coordinator.snapshot().utilisation <= 1.0


def test_held_trial_counts_as_pending() -> None:
    run = Run(make(3, world=3, policy="fixed", ranks=2), by_trial(SIXTEEN))
    run.obey(run.coordinator.begin(0.0))
    assert run.coordinator.snapshot().counts == {Status.RUNNING: 1, Status.PENDING: 1}
    assert run.coordinator.status(1) is Status.PENDING
    assert run.drive().reason == "completed"


def test_searcher_is_told_every_outcome() -> None:
    searcher = ListSearcher(8)
    run = Run(make(8, searcher=searcher), by_trial(SIXTEEN), jitter(7)).drive()
    assert searcher.told == run.outcomes


def test_unknown_outcomes_are_refused() -> None:
    coordinator = make(4, world=2)
    first, second = (entry.allocation for entry in coordinator.begin(0.0))  # type: ignore[union-attr]
    coordinator.tell(ended(first, 1.0), 1.0)
    with pytest.raises(InternalError, match="evaluation 0, which was told already"):
        coordinator.tell(ended(first, 1.0), 1.0)
    with pytest.raises(InternalError, match="evaluation 7, which was never started"):
        coordinator.tell(ended(replace(second, serial=7), 1.0), 1.0)
    with pytest.raises(InternalError, match="begun twice"):
        coordinator.begin(1.0)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_finished_without_objective(value: float | None) -> None:
    coordinator = make(4)
    start = coordinator.begin(0.0)[0]
    assert isinstance(start, Start)
    with pytest.raises(InternalError, match=f"objective {value}"):
        coordinator.tell(ended(start.allocation, value), 1.0)


def test_interrupted_without_stop() -> None:
    coordinator = make(4)
    start = coordinator.begin(0.0)[0]
    assert isinstance(start, Start)
    with pytest.raises(InternalError, match="nothing was stopped"):
        coordinator.tell(ended(start.allocation, ending=Ending.INTERRUPTED), 1.0)


def test_more_ranks_than_train() -> None:
    with pytest.raises(ExperimentError, match=r"allocation\.ranks: 4 ranks per trial"):
        make(4, world=4, training_ranks=range(1, 4), ranks=4)


def test_trial_seeds() -> None:
    seeds = {trial_seed(seed, trial) for seed in range(20) for trial in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert trial_seed(17, 1) != trial_seed(1, 71)


class Scripted:
    """A scheduler that hands out what a test puts into ``ready``."""

    def __init__(self) -> None:
        self.ready: list[Evaluation] = []
        self.out = 0
        self.done = False

    def ask(self) -> Evaluation | None:
        if not self.ready:
            return None
        self.out += 1
        return self.ready.pop(0)

    def tell(self, outcome: object) -> None:
        self.out -= 1

    def results(self) -> tuple[RungResult, ...]:
        return ()

    def status(self, trial_id: int) -> Status:
        return Status.PARKED


def scripted(scheduler: Scripted, policy: object, world: int, trials: int) -> Coordinator:
    """A coordinator of a scripted scheduler that has drawn ``trials`` trials."""

    def build(propose: Propose) -> Scripted:
        for _ in range(trials):
            propose()
        return scheduler

    return Coordinator(
        searcher=ListSearcher(trials),
        scheduler=build,  # type: ignore[arg-type]
        policy=lambda _: policy,  # type: ignore[arg-type, return-value]
        topology=Topology.even(world),
        objective=LOSS,
        seed=0,
        training_ranks=range(world),
    )


class ByRung:
    """Widths by rung, and no sharing."""

    def __init__(self, *widths: int) -> None:
        self.widths = widths

    def width(self, work: Evaluation) -> int:
        return self.widths[work.rung]

    def share(self, work: Sequence[Evaluation], free: int) -> list[int]:
        return [self.width(entry) for entry in work]


def started(instructions: Sequence[object]) -> list[tuple[int, int]]:
    """Trial and rung of what starts."""
    return [
        (entry.allocation.evaluation.trial.id, entry.allocation.evaluation.rung)
        for entry in instructions
        if isinstance(entry, Start)
    ]


def test_promoted_evaluation_overtakes_a_held_new_one() -> None:
    scheduler = Scripted()
    coordinator = scripted(scheduler, ByRung(2, 2), world=3, trials=3)
    scheduler.ready = [evaluation(0), evaluation(1)]
    first = coordinator.begin(0.0)
    assert started(first) == [(0, 0)]  # trial 1 needs two ranks and is held
    scheduler.ready = [evaluation(0, rung=1, start=1, stop=2), evaluation(2)]
    second = coordinator.tell(ended(first[0].allocation, 1.0), 1.0)  # type: ignore[union-attr]
    assert started(second) == [(0, 1)]
    assert [work.trial.id for work in scheduler.ready] == [2]  # no second one is held
    third = coordinator.tell(ended(second[-1].allocation, 1.0), 2.0)  # type: ignore[union-attr]
    assert started(third) == [(1, 0)]


def test_held_evaluation_starts_when_the_promoted_one_does_not_fit() -> None:
    scheduler = Scripted()
    coordinator = scripted(scheduler, ByRung(2, 4), world=5, trials=4)
    scheduler.ready = [evaluation(0), evaluation(1), evaluation(2)]
    first = coordinator.begin(0.0)
    assert started(first) == [(0, 0), (1, 0)]
    scheduler.ready = [evaluation(0, rung=1, start=1, stop=2), evaluation(3)]
    second = coordinator.tell(ended(first[0].allocation, 1.0), 1.0)  # type: ignore[union-attr]
    assert started(second) == [(2, 0)]
    third = coordinator.tell(ended(first[1].allocation, 1.0), 2.0)  # type: ignore[union-attr]
    assert started(third) == []  # now the promoted one is held, and nothing passes it
    fourth = coordinator.tell(ended(second[0].allocation, 1.0), 3.0)  # type: ignore[union-attr]
    assert started(fourth) == [(0, 1)]


def test_stalled_scheduler_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(InternalError, match="Scripted is not done"):
        scripted(Scripted(), ByRung(1), world=2, trials=0).begin(0.0)


@pytest.mark.parametrize("width", [0, 3])
def test_impossible_width(width: int) -> None:
    scheduler = Scripted()
    coordinator = scripted(scheduler, ByRung(width), world=2, trials=1)
    scheduler.ready = [evaluation(0)]
    with pytest.raises(AllocationError, match=f"ByRung wants {width} of 2 ranks for trial 0"):
        coordinator.begin(0.0)


def test_impossible_shares() -> None:
    class Greedy(ByRung):
        def share(self, work: Sequence[Evaluation], free: int) -> list[int]:
            return [free + 1]

    scheduler = Scripted()
    coordinator = scripted(scheduler, Greedy(1), world=2, trials=1)
    scheduler.ready = [evaluation(0)]
    with pytest.raises(AllocationError, match=r"Greedy shares 2 free ranks .* as \[3\]"):
        coordinator.begin(0.0)


def test_policy_sees_the_training_ranks_only() -> None:
    doubling = build_policy(AllocationSettings(), reduction_factor=2, world_size=3)
    assert doubling.width(evaluation(0, rung=5)) == 3
