"""States within a budget: what goes first, what stays, and that results are the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpihpo.allocation import Topology
from mpihpo.holdings import Holdings
from mpihpo.instructions import Drop, Notice, Save
from mpihpo.records import Allocation, Ending, Evaluation, Outcome
from tests.unit.virtual_clock import Run, ended, evaluation, jitter, make


def finished(
    trial_id: int, stop: int, size: int | None, keepers: tuple[int, ...] = (0,)
) -> Outcome:
    work = evaluation(trial_id, stop=stop)
    allocation = Allocation(serial=0, evaluation=work, ranks=keepers, keepers=keepers)
    return ended(allocation, 0.5, state_bytes=size)


def filled(budget: int, *, keepers: tuple[int, ...] = (0, 1), trials: int = 4) -> Holdings:
    """States of 10 bytes after epoch 1, in memory and on the disk; the first is the best."""
    holdings = Holdings(budget)
    for trial_id in range(trials):
        assert holdings.keep(finished(trial_id, 1, 10, keepers), (-1, trial_id, trial_id)) == []
        holdings.saved(trial_id, 1, 10)
    return holdings


def drops(instructions: list[object]) -> list[Drop]:
    return [each for each in instructions if isinstance(each, Drop)]


def test_without_a_budget_nothing_is_dropped():
    holdings = Holdings()
    for trial_id in range(100):
        holdings.keep(finished(trial_id, 1, 10**12), (-1, 0.0, trial_id))
    assert holdings.make_room(None) == []


def test_second_copies_go_first_and_only_those_that_must():
    assert filled(80).make_room(0) == []
    assert drops(filled(79).make_room(0)) == [Drop(3, (1,))]
    assert drops(filled(60).make_room(0)) == [Drop(3, (1,)), Drop(2, (1,))]


def test_then_only_copies_go_the_least_promising_first_and_the_best_stays():
    copies = [Drop(3, (1,)), Drop(2, (1,)), Drop(1, (1,))]
    holdings = filled(40)
    assert drops(holdings.make_room(0)) == [*copies, Drop(3, (0,))]
    assert [holdings.holders(trial_id) for trial_id in range(4)] == [(0, 1), (0,), (0,), ()]
    everything = filled(1).make_room(0)
    memory = [*copies, Drop(3, (0,)), Drop(2, (0,)), Drop(1, (0,))]
    disk = [Drop(trial_id, (), from_disk=True) for trial_id in (3, 2, 1)]
    assert drops(everything) == [*memory, *disk]


def test_every_state_that_is_dropped_is_told_in_one_line():
    holdings = Holdings(2_500_000)
    for trial_id in range(2):
        size = 1_500_000
        holdings.keep(finished(trial_id, 1, size), (-1, trial_id, trial_id))
        holdings.saved(trial_id, 1, size)
    texts = [each.text for each in holdings.make_room(0) if isinstance(each, Notice)]
    rest = (
        "1.5 MB is dropped, as the least promising one, to stay within limits.state_bytes: 2.5 MB"
    )
    assert texts == [
        f"trial 1: its state in memory of {rest}",
        f"trial 1: its state on the disk of {rest}",
    ]


def test_more_epochs_promise_more_than_a_better_objective():
    holdings = Holdings(20)
    for trial_id, stop, key in ((0, 1, 0.1), (1, 2, 0.9), (2, 1, 0.2)):
        holdings.keep(finished(trial_id, stop, 10), (-stop, key, trial_id))
    assert drops(holdings.make_room(None)) == [Drop(2, (0,))]


def test_what_running_evaluations_will_leave_is_reserved():
    holdings = filled(50, keepers=(0,))
    holdings.starts(3, keepers=1)
    assert holdings.make_room(0) == []
    holdings.starts(7, keepers=2)  # new: taken for as large as the largest
    assert drops(holdings.make_room(0)) == [
        Drop(2, (0,)),
        Drop(1, (0,)),
        Drop(2, (), from_disk=True),
    ]
    holdings.ends(7)
    holdings.ends(3)
    assert holdings.make_room(0) == []


def test_sizes_that_become_known_count_for_those_that_run_already():
    holdings = Holdings(30)
    for trial_id in range(4):
        holdings.starts(trial_id, keepers=1)
    holdings.ends(0)
    holdings.keep(finished(0, 1, 10), (-1, 0.0, 0))
    assert drops(holdings.make_room(None)) == [Drop(0, (0,))]


def test_states_of_running_trials_stay():
    holdings = filled(1)
    for trial_id in range(1, 4):
        holdings.starts(trial_id, keepers=1)
    assert holdings.make_room(0) == []
    holdings.ends(2)
    assert [each.trial_id for each in drops(holdings.make_room(0))] == [2, 2, 2]


def test_a_state_on_its_way_to_the_disk_counts_and_is_not_deleted():
    holdings = Holdings(20)
    for trial_id in range(3):
        holdings.keep(finished(trial_id, 1, 10), (-1, trial_id, trial_id))
        if trial_id < 2:
            holdings.saved(trial_id, 1, 10)
    assert Drop(1, (), from_disk=True) in holdings.make_room(0)
    assert holdings.newest_saved(2, 1) == 0
    holdings.saved(2, 1, None)  # it could not be written
    holdings.keep(finished(3, 1, 10), (-1, 0.5, 3))
    assert [each for each in drops(holdings.make_room(0)) if each.from_disk] == []


def test_word_of_an_older_state_that_comes_late():
    holdings = Holdings(100)
    for epoch in (1, 2):
        holdings.keep(finished(0, epoch, 10), (-epoch, 0.0, 0))
    holdings.saved(0, 2, 10)
    holdings.saved(0, 1, 10)
    assert holdings.newest_saved(0, 1) == 0
    assert holdings.newest_saved(0, 9) == 2


def test_newer_states_stay_while_a_lower_rung_is_done_again():
    holdings = Holdings(100)
    holdings.replay({0: {4: 10}})
    holdings.keep(finished(0, 1, 10), (-1, 0.0, 0))
    holdings.saved(0, 1, 10)
    assert [holdings.newest_saved(0, epoch) for epoch in (1, 3, 4)] == [1, 1, 4]


def test_what_was_never_there_leaves_nothing_behind():
    holdings = Holdings(100)
    holdings.starts(0, keepers=1)
    holdings.ends(0)
    assert holdings.forget(0) == []
    holdings.keep(finished(0, 1, 10), (-1, 0.0, 0))
    assert holdings.forget(0) == [Drop(0, (0,), has_ended=True)]
    assert holdings.forget(0) == []
    assert holdings.holders(0) == ()


@pytest.mark.parametrize("size", [0, None])
def test_states_without_a_size_are_never_in_the_way(size: int | None):
    holdings = Holdings(1)
    for trial_id in range(5):
        holdings.keep(finished(trial_id, 1, size), (-1, 0.0, trial_id))
    assert holdings.make_room(None) == []
    # Where there is no state, any rank can go on from there.
    assert holdings.newest_saved(0, 1) == (1 if size == 0 else 0)


def test_a_decision_does_not_cost_what_all_trials_cost():
    def seconds(trials: int) -> float:
        """Of a thousand evaluations while so many trials are parked, each dropping one state."""
        holdings = Holdings(10 * trials)
        promises = random.Random(0).sample(range(10 * trials), trials)
        for trial_id, promise in enumerate(promises):
            holdings.keep(finished(trial_id, 1, 10), (-1, promise, trial_id))
            holdings.saved(trial_id, 1, 10)
        before = time.process_time()
        for trial_id in range(trials, trials + 1000):
            holdings.starts(trial_id, keepers=1)
            holdings.ends(trial_id)
            holdings.keep(finished(trial_id, 1, 10), (-1, trials * 5 + 0.5, trial_id))
            holdings.saved(trial_id, 1, 10)
            assert len(holdings.make_room(0)) == 4
        return time.process_time() - before

    assert seconds(5000) < 5 * seconds(50)


# Whole runs.


def by_epoch(seed: int) -> Callable[[Evaluation], float]:
    """A loss that depends on trial and epoch only."""
    return lambda work: random.Random(f"{seed}:{work.trial.id}:{work.stop}").random()


def epochs(run: Run) -> int:
    return sum(start.evaluation.stop - start.evaluation.start for start in run.starts)


def budgeted(
    trials: int,
    states: int | None,
    world: int | Topology,
    seed: int = 0,
    *,
    save_seconds: Callable[[Outcome], float] = lambda outcome: 0.0,
    **options: object,
) -> Run:
    """A run with states of 1 GB, of which there is room for so many."""
    budget = None if states is None else states * 10**9
    return Run(
        make(trials, world=world, state_bytes=budget, **options),  # type: ignore[arg-type]
        by_epoch(seed),
        jitter(seed),
        state_bytes=10**9,
        save_seconds=save_seconds,
        budget=budget,
    ).drive()


@pytest.mark.parametrize("seed", range(5))
def test_64_parked_trials_and_room_for_ten_states(seed: int):
    free = budgeted(64, None, 4, seed)
    tight = budgeted(64, 10, 4, seed)
    assert max(free.peak) > 60 * 10**9
    assert max(tight.peak) <= 10 * 10**9
    assert tight.rungs == free.rungs
    assert tight.reason == free.reason == "completed"
    assert epochs(tight) > epochs(free)
    assert isinstance(tight.log[-2], Save)
    # The states of the second rung's best are the ones that were kept.
    kept = [
        start for start in tight.starts if start.evaluation.rung == 1 and start.evaluation.start
    ]
    promoted = tight.rungs[0].promoted
    assert {start.evaluation.trial.id for start in kept} >= set(promoted[:3])
    again = [text for text in tight.notices if text.endswith("it trains again from epoch 1")]
    assert len(again) == sum(
        start.evaluation.rung > 0 and not start.evaluation.start for start in tight.starts
    )


def test_two_nodes_give_up_their_second_copies_first():
    run = budgeted(16, 20, Topology.even(4, 2), ranks=3)
    texts = [text for text in run.notices if "limits.state_bytes" in text]
    assert texts
    assert all("the second copy of its state of 1 GB is dropped" in text for text in texts)
    assert run.rungs == budgeted(16, None, 1).rungs
    assert epochs(run) == epochs(budgeted(16, None, 1))


def test_a_failed_trial_leaves_its_room_to_others():
    run = Run(
        make(8, world=2, state_bytes=4),
        lambda work: None if work.trial.id % 2 else float(work.trial.id),
        jitter(0),
        state_bytes=1,
        save_seconds=lambda outcome: 0.0,
        budget=4,
    ).drive()
    assert run.reason == "completed"
    assert {
        o.allocation.evaluation.trial.id for o in run.outcomes if o.ending is Ending.FAILED
    } == {
        1,
        3,
        5,
        7,
    }


@settings(max_examples=150, deadline=None)
@given(
    trials=st.integers(1, 24),
    states=st.integers(1, 40),
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    factor=st.integers(2, 3),
    ranks=st.integers(1, 3),
    slow=st.floats(0.0, 4.0),
    seed=st.integers(0, 10_000),
)
def test_a_budget_costs_epochs_and_changes_no_result(
    trials: int,
    states: int,
    nodes: list[int],
    factor: int,
    ranks: int,
    slow: float,
    seed: int,
):
    topology = Topology(tuple(node for node, size in enumerate(nodes) for _ in range(size)))

    def run(states: int | None) -> Run:
        rng = random.Random(seed)
        return budgeted(
            trials,
            states,
            topology,
            seed,
            factor=factor,
            ranks=min(ranks, topology.size),
            save_seconds=lambda outcome: rng.uniform(0.0, slow),
        )

    free, tight = run(None), run(states)
    assert tight.rungs == free.rungs
    assert tight.reason == free.reason == "completed"
    assert epochs(tight) >= epochs(free)
    best, expected = tight.coordinator.best, free.coordinator.best
    assert best is not None
    assert expected is not None
    assert best.allocation.evaluation.trial == expected.allocation.evaluation.trial
    assert tight.log[-2:][0] == Save(best.allocation.evaluation.trial.id, tight.log[-2].rank)
    assert set(tight.remembered()) == {best.allocation.evaluation.trial.id}
