"""The watch: which evaluations must end by force, and which ranks have to be set aside.

Decides, and does nothing itself: the dispatcher feeds it what it hears and carries out what `due`
returns. An evaluation that runs too long, whose ranks are silent or dead, or whose ranks wait for
each other in vain, is released: all its members are to leave it. Those that have not left it when
the grace is over are given up: they are set aside, and the job goes on without them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from mpihpo.errors import CollectiveMismatch, Overdue, RankLost, TrialTimeout
from mpihpo.records import Allocation, Failure
from mpihpo.results.encoding import name_ranks

BEATS = 4
"""Signs of life that a rank is to give in ``limits.heartbeat_seconds``."""

_CHECKS_PER_HEARTBEAT = 8
_MISMATCHED_BEATS = 2  # in a row, of every rank, in different calls
_STANDSTILL_BEATS = BEATS  # in a row, of every rank, in one and the same call
_STACKS_AT = 0.5  # of the grace


@dataclass(frozen=True, slots=True)
class Release:
    """All members are to leave the evaluation, and to tell where they stood."""

    allocation: Allocation
    failure: Failure


@dataclass(frozen=True, slots=True)
class AskStacks:
    """These ranks have not left the evaluation so far."""

    allocation: Allocation
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """These ranks did not leave the evaluation in time, or are dead."""

    allocation: Allocation
    failure: Failure
    ranks: tuple[int, ...]


Verdict = Release | AskStacks | GiveUp


@dataclass(slots=True)
class _Ending:
    """An evaluation that failed, until all its ranks are out of it."""

    since: float
    failure: Failure
    has_asked: bool = False


@dataclass(slots=True)
class _Running:
    allocation: Allocation
    since: float
    waits: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By rank: the call it waits in, and for how many beats in a row."""
    through: set[int] = field(default_factory=set)
    """Ranks that are out of it, which one may say before the word of the failure itself comes."""
    ending: _Ending | None = None


class Watch:
    """Pure. Times are seconds on the clock of whoever passes them.

    Args:
        trial_seconds: An evaluation may take so long; None: as long as it likes.
        grace_seconds: A rank may take so long to leave a failed evaluation.
        heartbeat_seconds: A rank that trains may be silent so long; None: for ever.
    """

    def __init__(
        self,
        *,
        trial_seconds: float | None,
        grace_seconds: float,
        heartbeat_seconds: float | None,
    ) -> None:
        self._trial_seconds, self._grace = trial_seconds, grace_seconds
        self._heartbeat = heartbeat_seconds
        self._running: dict[int, _Running] = {}  # in the order of their start
        self._ending: set[int] = set()
        self._heard: dict[int, float] = {}
        self._given_up: defaultdict[int, set[int]] = defaultdict(set)  # by serial
        self._checked = self._awake_since = 0.0
        self._due: list[Verdict] = []

    # What is heard.

    def started(self, allocation: Allocation, now: float) -> None:
        """An evaluation was given its ranks."""
        self._running[allocation.serial] = _Running(allocation, now)

    def ended(self, serial: int) -> None:
        """All ranks of an evaluation are free."""
        del self._running[serial]
        self._ending.discard(serial)
        self._due = [verdict for verdict in self._due if verdict.allocation.serial != serial]

    def is_running(self, serial: int) -> bool:
        """Whether an evaluation was started and has neither ended nor been given up."""
        return serial in self._running

    def beat(self, rank: int, serial: int, waits_in: str | None, now: float) -> None:
        """A rank gave a sign of life, and said in which call it has waited since the last one."""
        self._heard[rank] = now
        running = self._running.get(serial)
        if running is None or running.ending is not None:
            return
        if waits_in is None:
            running.waits.pop(rank, None)
            return
        text, beats = running.waits.get(rank, ("", 0))
        running.waits[rank] = (waits_in, beats + 1 if text == waits_in else 1)
        self._compare(running, now)

    def failing(self, serial: int, failure: Failure, now: float) -> None:
        """A member has failed and told the others."""
        running = self._running.get(serial)
        if running is not None and running.ending is None:
            self._end(running, failure, now)

    def through(self, rank: int, serial: int) -> bool:
        """A rank has left a failed evaluation; returns whether it had been given up: it is back."""
        if rank in self._given_up.get(serial, ()):
            self._given_up[serial].discard(rank)
            if not self._given_up[serial]:
                del self._given_up[serial]
            return True
        running = self._running.get(serial)
        if running is not None:
            running.through.add(rank)
        return False

    def overdue(self, serial: int, now: float) -> None:
        """The job's time is over, and an evaluation has not ended its epoch."""
        running = self._running[serial]
        if running.ending is None:
            leader = running.allocation.leader
            text = "the job's time is over, and it did not come to the end of its epoch"
            self._release(running, _failure(Overdue, leader, text), now)

    # What is to be done.

    def due(self, now: float, dead: Collection[int] = ()) -> list[Verdict]:
        """What has to be done by now.

        Args:
            now: The time.
            dead: World ranks that have died.
        """
        self._too_long(now)
        self._silent(now)
        if dead:
            self._bereaved(now, dead)
        for serial in list(self._ending):
            self._force(self._running[serial], now, dead)
        due, self._due = self._due, []
        return due

    def _end(self, running: _Running, failure: Failure, now: float) -> None:
        running.ending = _Ending(now, failure)
        running.waits.clear()
        self._ending.add(running.allocation.serial)

    def _release(self, running: _Running, failure: Failure, now: float) -> None:
        self._end(running, failure, now)
        self._due.append(Release(running.allocation, failure))

    def _too_long(self, now: float) -> None:
        limit = self._trial_seconds
        if limit is None:
            return
        for running in self._running.values():
            if now - running.since <= limit:
                break  # the others started later
            if running.ending is None:
                text = f"took longer than limits.trial_seconds: {limit:g}"
                failure = _failure(TrialTimeout, running.allocation.leader, text)
                self._release(running, failure, now)

    def _silent(self, now: float) -> None:
        limit = self._heartbeat
        if limit is None or now - self._checked < limit / _CHECKS_PER_HEARTBEAT:
            return
        if now - self._checked > limit / BEATS:
            self._awake_since = now  # nobody was heard while this process itself was away
        self._checked = now
        for running in self._running.values():
            since = max(running.since, self._awake_since)
            if running.ending is not None or now - since <= limit:
                continue
            silent = [
                rank
                for rank in running.allocation.ranks
                if now - max(since, self._heard.get(rank, 0.0)) > limit
            ]
            if silent:
                text = f"{name_ranks(silent)} gave no sign of life for {limit:g} s"
                self._release(running, _failure(TrialTimeout, silent[0], text), now)

    def _bereaved(self, now: float, dead: Collection[int]) -> None:
        for running in self._running.values():
            died = [rank for rank in running.allocation.ranks if rank in dead]
            if died and running.ending is None:
                failure = _failure(RankLost, died[0], f"{name_ranks(died)} died")
                self._release(running, failure, now)

    def _compare(self, running: _Running, now: float) -> None:
        """Whether all ranks wait in calls that cannot end."""
        waits, ranks = running.waits, running.allocation.ranks
        if len(waits) < len(ranks) or len(ranks) < 2:
            return
        at: defaultdict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            at[waits[rank][0]].append(rank)
        least = _MISMATCHED_BEATS if len(at) > 1 else _STANDSTILL_BEATS
        if min(beats for _, beats in waits.values()) >= least:
            text = "; ".join(f"{name_ranks(who)} in {call}" for call, who in at.items())
            failure = _failure(CollectiveMismatch, ranks[0], f"its ranks wait in vain: {text}")
            self._release(running, failure, now)

    def _force(self, running: _Running, now: float, dead: Collection[int]) -> None:
        ending, allocation = running.ending, running.allocation
        assert ending is not None
        missing = [rank for rank in allocation.ranks if rank not in running.through or rank in dead]
        alive = [rank for rank in missing if rank not in dead]
        if alive and now - ending.since < self._grace:
            if not ending.has_asked and now - ending.since > self._grace * _STACKS_AT:
                ending.has_asked = True
                self._due.append(AskStacks(allocation, tuple(alive)))
            return
        if not missing:
            return  # the leader's word is on its way
        self._given_up[allocation.serial].update(alive)
        self.ended(allocation.serial)
        self._due.append(GiveUp(allocation, ending.failure, tuple(missing)))


def _failure(error: type[Exception], rank: int, text: str) -> Failure:
    return Failure(rank=rank, kind=error.__name__, message=text)
