"""The watch, on a virtual clock: who is released when, asked, and given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpihpo.records import Allocation, Evaluation, Failure, TrialRecord
from mpihpo.runner.watch import BEATS, AskStacks, GiveUp, Release, Verdict, Watch

GRACE, HEARTBEAT, LIMIT = 10.0, 80.0, 100.0
BEAT = HEARTBEAT / BEATS
ERROR = Failure(rank=1, kind="ValueError", message="as chosen")


def allocation(serial: int, ranks: Iterable[int] = (0, 1)) -> Allocation:
    ranks = tuple(ranks)
    trial = TrialRecord(id=serial, seed=0, config={})
    evaluation = Evaluation(trial=trial, rung=0, start=0, stop=1)
    return Allocation(
        serial=serial, evaluation=evaluation, ranks=ranks, holders=(), keepers=ranks[:1]
    )


def watch(
    trial_seconds: float | None = LIMIT, heartbeat_seconds: float | None = HEARTBEAT
) -> Watch:
    return Watch(
        trial_seconds=trial_seconds, grace_seconds=GRACE, heartbeat_seconds=heartbeat_seconds
    )


def started(*allocations: Allocation, **options: float | None) -> Watch:
    made = watch(**options)
    for each in allocations:
        made.started(each, 0.0)
    return made


def beaten(made: Watch, until: float, ranks: Iterable[int], serial: int, waits: str | None = None):
    """Beats of all ranks in turn; returns what became due."""
    ranks = tuple(ranks)
    due: list[Verdict] = []
    now = 0.0
    while now < until:
        now += BEAT
        for rank in ranks:
            made.beat(rank, serial, waits, now)
        due += made.due(now)
    return due


# An evaluation that takes too long.


def test_an_evaluation_in_time_is_left_alone():
    made = started(allocation(0), heartbeat_seconds=None)
    assert made.due(LIMIT) == []
    made.ended(0)
    assert made.due(LIMIT + 1) == []


def test_one_that_takes_too_long_is_released_once():
    made = started(allocation(0), heartbeat_seconds=None)
    (release,) = made.due(LIMIT + 0.1)
    assert isinstance(release, Release)
    assert release.failure.kind == "TrialTimeout"
    assert release.failure.rank == 0
    assert release.failure.message == "took longer than limits.trial_seconds: 100"
    assert made.due(LIMIT + 0.2) == []


def test_the_limit_counts_from_each_ones_start():
    made = started(allocation(0), heartbeat_seconds=None)
    made.started(allocation(1, [2]), 50.0)
    assert [each.allocation.serial for each in made.due(101.0)] == [0]
    made.ended(0)
    assert [each.allocation.serial for each in made.due(151.0)] == [1]


def test_without_a_limit_it_takes_as_long_as_it_likes():
    made = started(allocation(0), trial_seconds=None, heartbeat_seconds=None)
    assert made.due(1e9) == []


def test_an_overdue_evaluation_is_released_once():
    made = started(allocation(0))
    made.overdue(0, 5.0)
    made.overdue(0, 6.0)
    (release,) = made.due(6.0)
    assert isinstance(release, Release)
    assert release.failure.kind == "Overdue"


def test_what_has_ended_meanwhile_is_not_released():
    made = started(allocation(0))
    made.overdue(0, 5.0)
    made.ended(0)
    assert made.due(6.0) == []
    assert not made.is_running(0)


# Silence.


def test_ranks_that_beat_are_left_alone():
    made = started(allocation(0), trial_seconds=None)
    assert beaten(made, 20 * HEARTBEAT, [0, 1], 0) == []


def test_a_silent_rank_is_named():
    made = started(allocation(0, [0, 1, 2]), trial_seconds=None)
    (release,) = beaten(made, HEARTBEAT + BEAT, [0, 2], 0)
    assert isinstance(release, Release)
    assert release.failure.kind == "TrialTimeout"
    assert release.failure.message == "rank 1 gave no sign of life for 80 s"
    assert release.failure.rank == 1


def test_silence_counts_from_the_start_of_the_evaluation():
    made = watch(trial_seconds=None)
    made.beat(0, -1, None, 1.0)
    for now in range(0, 1000, 10):
        assert made.due(float(now)) == []
    made.started(allocation(3, [0]), 1000.0)
    assert [made.due(float(now)) for now in range(1000, 1081, 10)] == [[]] * 9
    assert len(made.due(1091.0)) == 1


def test_nobody_is_silent_while_the_watch_itself_was_away():
    made = started(allocation(0), trial_seconds=None)
    assert made.due(10.0) == []
    assert made.due(1000.0) == []
    assert made.due(1000.0 + HEARTBEAT / BEATS) == []
    due = [made.due(1020.0 + 10 * i) for i in range(8)]
    assert [len(each) for each in due].count(1) == 1


def test_without_heartbeats_nobody_is_silent():
    made = started(allocation(0), trial_seconds=None, heartbeat_seconds=None)
    assert [made.due(float(now)) for now in range(0, 10000, 10)] == [[]] * 1000


# Ranks that wait for each other.


def test_ranks_in_different_calls_wait_in_vain_after_two_beats():
    made = started(allocation(0, [4, 5, 6]), trial_seconds=None)
    for now in (20.0, 40.0):
        assert made.due(now) == []
        for rank, call in ((4, "recv at a.py:1"), (5, "Barrier at a.py:2"), (6, "recv at a.py:1")):
            made.beat(rank, 0, call, now)
    (release,) = made.due(40.0)
    assert isinstance(release, Release)
    assert release.failure.kind == "CollectiveMismatch"
    assert release.failure.message == (
        "its ranks wait in vain: ranks 4,6 in recv at a.py:1; rank 5 in Barrier at a.py:2"
    )
    for rank in (4, 5, 6):
        made.beat(rank, 0, "recv at a.py:1", 41.0)
    assert made.due(41.0) == []


def test_ranks_in_the_same_call_stand_still_after_more_beats():
    made = started(allocation(0), trial_seconds=None)
    assert beaten(made, (BEATS - 1) * BEAT, [0, 1], 0, "Barrier at a.py:2") == []
    for rank in (0, 1):
        made.beat(rank, 0, "Barrier at a.py:2", HEARTBEAT)
    (release,) = made.due(HEARTBEAT)
    assert isinstance(release, Release)
    assert release.failure.kind == "CollectiveMismatch"


@pytest.mark.parametrize("other", [None, "recv at a.py:3"])
def test_a_rank_that_gets_on_begins_to_count_anew(other: str | None):
    made = started(allocation(0), trial_seconds=None)
    for beat in range(40):
        now = beat * BEAT
        made.beat(0, 0, "Barrier at a.py:2", now)
        made.beat(1, 0, other if beat % 2 else "Barrier at a.py:4", now)
        assert made.due(now) == []


def test_one_rank_waits_for_nobody():
    made = started(allocation(0, [3]), trial_seconds=None)
    assert beaten(made, 20 * HEARTBEAT, [3], 0, "recv at a.py:1") == []


def test_a_rank_that_computes_lets_the_others_wait():
    made = started(allocation(0, [0, 1, 2]), trial_seconds=None)
    for beat in range(40):
        for rank in (0, 1, 2):
            made.beat(rank, 0, "Barrier at a.py:2" if rank else None, beat * BEAT)
        assert made.due(beat * BEAT) == []


def test_beats_of_another_evaluation_say_nothing_of_this_one():
    made = started(allocation(7), trial_seconds=None)
    assert beaten(made, 20 * HEARTBEAT, [0, 1], 6, "Barrier at a.py:2") == []


# From the failure to the end.


def failing(*ranks: int) -> Watch:
    made = started(allocation(0, ranks))
    made.failing(0, ERROR, 1.0)
    return made


def test_a_failure_that_a_member_told_is_not_told_again():
    assert failing(0, 1).due(1.0) == []


def test_the_first_failure_counts():
    made = failing(0, 1)
    made.failing(0, Failure(rank=0, kind="KeyError", message="later"), 5.0)
    made.overdue(0, 5.0)
    assert isinstance(made.due(7.0)[0], AskStacks)
    (verdict,) = made.due(1.0 + GRACE)
    assert isinstance(verdict, GiveUp)
    assert verdict.failure is ERROR


def test_who_has_not_left_is_asked_once_and_then_given_up():
    made = failing(0, 1, 2)
    assert not made.through(0, 0)
    assert made.due(5.9) == []
    assert made.due(6.1) == [AskStacks(allocation(0, [0, 1, 2]), (1, 2))]
    assert made.due(7.0) == []
    assert not made.through(2, 0)
    assert made.due(11.0) == [GiveUp(allocation(0, [0, 1, 2]), ERROR, (1,))]
    assert made.due(12.0) == []
    assert not made.is_running(0)


def test_when_all_are_out_the_leader_is_waited_for():
    made = failing(0, 1)
    made.through(0, 0)
    made.through(1, 0)
    assert made.due(1000.0) == []
    assert made.is_running(0)
    made.ended(0)
    assert not made.is_running(0)


def test_who_is_out_before_the_failure_is_known_is_out():
    made = started(allocation(0))
    assert not made.through(1, 0)
    made.failing(0, ERROR, 1.0)
    assert made.due(11.0) == [GiveUp(allocation(0), ERROR, (0,))]


def test_a_failure_of_what_has_ended_is_nothing():
    made = started(allocation(0))
    made.ended(0)
    made.failing(0, ERROR, 1.0)
    assert not made.through(1, 0)
    assert made.due(1000.0) == []


def test_who_was_given_up_comes_back_once():
    made = failing(0, 1)
    made.due(11.0)
    assert made.through(1, 0)
    assert not made.through(1, 0)
    assert made.through(0, 0)
    assert not made.through(0, 0)


def test_who_was_given_up_comes_back_from_that_evaluation_only():
    made = failing(0, 1)
    made.due(11.0)
    made.started(allocation(1, [2, 3]), 12.0)
    assert not made.through(0, 1)
    assert made.through(0, 0)


# Ranks that died.


def test_a_dead_rank_releases_the_others_and_is_waited_for_no_longer_than_they_are():
    made = started(allocation(0), allocation(1, [2]))
    (release,) = made.due(1.0, dead=[1])
    assert isinstance(release, Release)
    assert release.failure == Failure(rank=1, kind="RankLost", message="rank 1 died")
    made.through(0, 0)
    assert made.due(1.1, dead=[1]) == [GiveUp(allocation(0), release.failure, (1,))]
    assert not made.through(1, 0)
    assert made.is_running(1)


def test_a_rank_that_died_after_it_was_out_is_missing_all_the_same():
    made = failing(0, 1)
    made.through(0, 0)
    made.through(1, 0)
    assert made.due(2.0, dead=[0]) == [GiveUp(allocation(0), ERROR, (0,))]


def test_dead_ranks_alone_are_given_up_at_once():
    made = started(allocation(0, [3]))
    (verdict,) = made.due(1.0, dead=[3])  # nobody is there to be released
    assert isinstance(verdict, GiveUp)
    assert verdict.failure.kind == "RankLost"
    assert verdict.ranks == (3,)


def test_who_is_stuck_beside_a_dead_rank_is_given_up_with_it():
    made = started(allocation(0, [0, 1, 2]))
    made.due(1.0, dead=[1])
    made.through(0, 0)
    assert made.due(6.5, dead=[1]) == [AskStacks(allocation(0, [0, 1, 2]), (2,))]
    (verdict,) = made.due(11.5, dead=[1])
    assert isinstance(verdict, GiveUp)
    assert verdict.ranks == (1, 2)


# Whatever is heard, in whatever order.

EVALUATIONS = [allocation(0, [0, 1, 2]), allocation(1, [3]), allocation(2, [4, 5])]
RANKS = range(6)
SERIALS = st.sampled_from(range(len(EVALUATIONS)))
EVENTS = st.one_of(
    st.tuples(st.just("started"), SERIALS),
    st.tuples(st.just("ended"), SERIALS),
    st.tuples(st.just("failing"), SERIALS),
    st.tuples(st.just("overdue"), SERIALS),
    st.tuples(st.just("through"), SERIALS.flatmap(lambda s: st.sampled_from(EVALUATIONS[s].ranks))),
    st.tuples(st.just("beat"), st.sampled_from(RANKS), st.sampled_from([None, "a", "b"])),
    st.tuples(st.just("dies"), st.sampled_from(RANKS)),
    st.tuples(st.just("due"), st.sampled_from([0.1, GRACE / 2, GRACE, BEAT, LIMIT])),
)
SERIAL_OF = {rank: each.serial for each in EVALUATIONS for rank in each.ranks}


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_whatever_is_heard_each_evaluation_ends_once_and_each_rank_is_back_once(events):
    made, now = watch(), 0.0
    dead: set[int] = set()
    begun: set[int] = set()
    ended: set[int] = set()
    said: set[int] = set()
    aside: set[int] = set()
    seen: Counter[tuple[type, int]] = Counter()
    back: Counter[int] = Counter()

    def is_running(serial: int) -> bool:
        assert made.is_running(serial) == (serial in begun and serial not in ended)
        return made.is_running(serial)

    def take(verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            serial = verdict.allocation.serial
            seen[type(verdict), serial] += 1
            assert seen[type(verdict), serial] == 1, "told twice"
            assert serial in begun
            assert serial not in ended, "told of what has ended"
            if isinstance(verdict, AskStacks):
                assert not set(verdict.ranks) & (said | dead)
            if isinstance(verdict, GiveUp):
                assert not set(verdict.ranks) & said.difference(dead), "was out in time"
                assert set(verdict.allocation.ranks) <= {*verdict.ranks, *said}
                ended.add(serial)
                aside.update(set(verdict.ranks).difference(dead))

    def through(rank: int) -> None:
        serial = SERIAL_OF[rank]
        if made.through(rank, serial):
            assert rank in aside
            back[rank] += 1
            assert back[rank] == 1
        elif is_running(serial):
            said.add(rank)

    for kind, *arguments in events:
        if kind == "due":
            now += arguments[0]
            take(made.due(now, dead))
        elif kind == "beat":
            made.beat(arguments[0], SERIAL_OF[arguments[0]], arguments[1], now)
        elif kind == "dies":
            dead.add(arguments[0])
        elif kind == "through":
            through(arguments[0])
        else:
            (serial,) = arguments
            if kind == "started":
                if serial not in begun:
                    begun.add(serial)
                    made.started(EVALUATIONS[serial], now)
            elif kind == "failing":
                made.failing(serial, ERROR, now)
            elif is_running(serial):
                if kind == "overdue":
                    made.overdue(serial, now)
                else:
                    made.ended(serial)
                    ended.add(serial)

    # In the end nobody says anything any more but those who are back.
    for _ in range(40):
        now += GRACE
        take(made.due(now, dead))
    for serial in begun.difference(ended):
        assert set(EVALUATIONS[serial].ranks) <= said, "neither ended nor given up"
        made.ended(serial)
        ended.add(serial)
    assert not any(is_running(serial) for serial in begun)
    for rank in sorted(aside):
        through(rank)
        through(rank)
    assert set(back) == aside
    assert made.due(now + LIMIT, dead) == []
