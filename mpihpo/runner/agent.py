"""The agent of a rank: reads alerts while the rank trains, and says that the rank is alive.

A thread of its own where MPI allows calls from several threads. Elsewhere `poll` is called from the
rank's waits and reports, and peers of a failed rank are released when they next call one of those.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import Backoff
from mpihpo.errors import CoordinatorLost, RankLost
from mpihpo.records import Failure
from mpihpo.runner.handover import send_state
from mpihpo.runner.orders import (
    Abort,
    Alive,
    Beat,
    Desert,
    GivenUp,
    Gone,
    SendState,
    Signalled,
    Stacks,
    StopSoon,
    TellStacks,
    Through,
)
from mpihpo.runner.standing import NUDGE, CollectiveWait, stacks
from mpihpo.runner.state import Keeper
from mpihpo.runner.watch import BEATS

if TYPE_CHECKING:
    from mpihpo.comm.group import Group
    from mpihpo.comm.world import World

_LONGEST_SLEEP_SECONDS = 0.01
_NUDGE_SECONDS = 1.0


class Agent:
    """Serves this rank's alerts. Use it as a context manager around the rank's work, in its thread.

    Args:
        world: The world.
        keeper: The states this rank keeps.
        coordinator_rank: World rank of the dispatcher, which is told everything.
        heartbeat_seconds: How long a rank may be silent.
    """

    def __init__(
        self,
        world: World,
        keeper: Keeper,
        coordinator_rank: int = 0,
        *,
        heartbeat_seconds: float,
    ) -> None:
        self._world, self._mailbox = world, world.mailbox
        self._keeper = keeper
        self._coordinator_rank = coordinator_rank
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._newest = -1  # serial of the newest group that was watched
        self._is_inside = False  # that evaluation, from its start until all of it is cleaned up
        self._cause: Failure | None = None
        self._early: dict[int, Failure] = {}
        self._given_up = -1
        self._gone: frozenset[int] = frozenset()
        self._signal: str | None = None
        self._stop = threading.Event()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()
        self._wait = CollectiveWait()
        self._is_training = False
        self._next_nudge = 0.0
        self._heartbeat = heartbeat_seconds
        self._beat_seconds = heartbeat_seconds / BEATS
        self._next_beat = 0.0
        self._polled = time.monotonic()
        self._coordinator_heard: float | None = None  # None: this rank does not watch over it
        self._desertion: str | None = None
        self.can_nudge = False
        """A handler for the signal `NUDGE` is there: a training function can be interrupted."""
        self.dumps_when_silent = False
        """Let `faulthandler` write the stacks of a rank whose threads are all stuck."""
        self._next_arming = 0.0
        self.fault: BaseException | None = None
        """What ended the thread, if something did."""

    # For the rank's own thread.

    @property
    def should_stop(self) -> bool:
        """Whether the job asked to leave training functions at the end of their epoch."""
        return self._stop.is_set()

    @property
    def cause(self) -> Failure | None:
        """The failure of another member of the present group."""
        return self._cause

    @property
    def gone(self) -> frozenset[int]:
        """World ranks that are dead or set aside, so that nothing will come from them."""
        return self._gone | self._world.dead

    def is_given_up(self, serial: int) -> bool:
        """Whether the coordinator has settled an evaluation without all of its ranks."""
        return self._given_up >= serial

    def watch(self, group: Group | None) -> None:
        """The group whose failures concern this rank from now on; None for none; local."""
        with self._lock:
            self._group = group
            self._cause = None
            if group is None:
                return
            self._newest, self._is_inside = group.serial, True
            self._next_beat = time.monotonic() + self._beat_seconds
            self._early = {
                serial: failure for serial, failure in self._early.items() if serial >= group.serial
            }
            early = self._early.pop(group.serial, None)
        if early is not None:
            self._abort(group.serial, early)

    @contextmanager
    def training(self) -> Iterator[None]:
        """While the training function runs it can be interrupted; local."""
        self._is_training = True
        if self._group is not None and self._group.size > 1:
            self._wait.begin()
        try:
            yield
        finally:
            self._is_training = False
            self._wait.forget()

    def leave(self, *, has_failed: bool) -> None:
        """This rank is out of its evaluation and has cleaned up; local."""
        with self._lock:
            self._is_inside = False
        if has_failed:
            self._post(Through(self._newest))

    def should_leave(self) -> bool:
        """Whether the training function runs on although its evaluation has failed."""
        group = self._group
        return self._is_training and group is not None and group.is_aborted

    def signal(self, name: str) -> None:
        """Note a signal; safe in a signal handler."""
        self._signal = name

    def serve(self) -> None:
        """To be called from the rank's own waits: polls where no thread does; local.

        Raises:
            CoordinatorLost: Outside of evaluations: the coordinator's rank is dead or silent.
            BaseException: What ended the agent's thread.
        """
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        if self._thread is None:
            self.poll()
        if self._desertion is not None and not self._is_inside:
            raise CoordinatorLost(self._desertion)

    # For the agent's thread.

    def poll(self) -> bool:
        """Read and serve what has arrived; local. Returns whether anything had."""
        signal, self._signal = self._signal, None
        if signal is not None:
            self._post(Signalled(self._world.rank, signal))
        arrived = False
        while (mail := self._mailbox.take(Tag.ALERT)) is not None:
            arrived = True
            self._serve_alert(*mail)
        self._world.pump_stores()
        self._look_after(time.monotonic())
        return arrived

    def _serve_alert(self, sender: int, alert: object) -> None:
        if isinstance(alert, Abort):
            self._abort(alert.serial, alert.failure)
        elif isinstance(alert, SendState):
            state = self._keeper.get(alert.trial_id, alert.epoch)
            send_state(self._mailbox, state, sender, alert.channel)
        elif isinstance(alert, StopSoon):
            self._stop.set()
        elif isinstance(alert, TellStacks):
            if self._is_inside and alert.serial == self._newest:
                self._post(Stacks(alert.serial, stacks()))
        elif isinstance(alert, GivenUp):
            self._given_up = max(self._given_up, alert.serial)
        elif isinstance(alert, Gone):
            self._gone = frozenset(alert.ranks)
            if self._world.rank in self._gone:
                self._coordinator_heard = None  # another rank watches over it now
        elif isinstance(alert, Alive):
            self._coordinator_heard = time.monotonic()
        elif isinstance(alert, Desert):
            self._desert(alert.reason)

    def _post(self, event: object) -> None:
        self._mailbox.post(event, self._coordinator_rank, Tag.EVENT)

    def _abort(self, serial: int, failure: Failure) -> None:
        with self._lock:
            group = self._group
            if serial > self._newest:
                self._early[serial] = failure
                return
            if serial < self._newest or not self._is_inside:
                self._post(Through(serial))
                return
            if group is None or self._cause is not None:
                return
            self._cause = failure
            self._next_nudge = time.monotonic() + _NUDGE_SECONDS
        group.mark_aborted()

    def _look_after(self, now: float) -> None:
        """What must be done although nothing arrived."""
        was_away = now - self._polled > self._beat_seconds
        self._polled = now
        if self._is_inside and self._thread is not None:
            self._beat(now)
        if self.should_leave() and self.can_nudge and now >= self._next_nudge:
            # A loop in Python, a sleep or a lock: the collectives are released by now.
            self._next_nudge = now + _NUDGE_SECONDS
            with suppress(ProcessLookupError):
                signal.pthread_kill(self._main, NUDGE)
        if self.dumps_when_silent and self._thread is not None and now >= self._next_arming:
            self._next_arming = now + self._beat_seconds
            with suppress(OSError, ValueError):
                if sys.__stderr__ is not None:
                    faulthandler.dump_traceback_later(self._heartbeat, file=sys.__stderr__)
        if self._coordinator_rank in self._world.dead:
            self._desert(f"rank {self._coordinator_rank}, which coordinates, died")
        if self._coordinator_heard is not None:
            if was_away:
                self._coordinator_heard = now
            if now - self._coordinator_heard > self._heartbeat:
                self._coordinator_heard = None
                self._call_to_desert()

    def _beat(self, now: float) -> None:
        self._wait.look()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_seconds
            self._post(Beat(self._newest, self._wait.lasting(self._beat_seconds)))

    # The end of a job whose coordinator's rank is gone.

    def _call_to_desert(self) -> None:
        rank = self._coordinator_rank
        reason = (
            f"rank {rank}, which coordinates, gave no sign of life for {self._heartbeat:g} s; "
            "the run can be resumed"
        )
        for other in range(self._world.size):
            if other not in (rank, self._world.rank):
                self._mailbox.post(Desert(reason), other, Tag.ALERT)
        self._desert(reason)

    def _desert(self, reason: str) -> None:
        if self._desertion is not None:
            return
        self._desertion = reason
        with self._lock:
            group, self._cause = self._group, self._cause or _lost(self._coordinator_rank, reason)
        if group is not None:
            group.mark_aborted()

    # The thread.

    def _run(self) -> None:
        backoff = Backoff(_LONGEST_SLEEP_SECONDS)
        try:
            while not self._end.is_set():
                if self.poll():
                    backoff.reset()
                backoff.pause()
        except BaseException as error:  # seen by the worker at its next wait
            self.fault = error

    def __enter__(self) -> Agent:
        if self._world.threads_may_call:
            self._thread = threading.Thread(target=self._run, name="mpihpo agent", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        if self.dumps_when_silent:
            faulthandler.cancel_dump_traceback_later()


def _lost(rank: int, reason: str) -> Failure:
    return Failure(rank=rank, kind=RankLost.__name__, message=reason)
