"""The agent of a rank: reads alerts while the rank trains.

A thread of its own where MPI allows calls from several threads. Elsewhere `poll` is called from the
rank's waits and reports, and peers of a failed rank are released when they next call one of those.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import Backoff
from mpihpo.records import Failure
from mpihpo.runner.handover import send_state
from mpihpo.runner.orders import Abort, SendState, Signalled, StopSoon
from mpihpo.runner.state import Keeper

if TYPE_CHECKING:
    from mpihpo.comm.group import Group
    from mpihpo.comm.world import World

_LONGEST_SLEEP_SECONDS = 0.01


class Agent:
    """Serves this rank's alerts. Use it as a context manager around the rank's work.

    Args:
        world: The world.
        keeper: The states this rank keeps.
        coordinator_rank: World rank that is told of signals.
    """

    def __init__(self, world: World, keeper: Keeper, coordinator_rank: int = 0) -> None:
        self._world = world
        self._keeper = keeper
        self._coordinator_rank = coordinator_rank
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._cause: Failure | None = None
        self._early: dict[int, Failure] = {}
        self._signal: str | None = None
        self._stop = threading.Event()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.fault: BaseException | None = None
        """What ended the thread, if something did."""

    @property
    def should_stop(self) -> bool:
        """Whether the job asked to leave training functions at the end of their epoch."""
        return self._stop.is_set()

    @property
    def cause(self) -> Failure | None:
        """The failure of another member of the present group."""
        return self._cause

    def watch(self, group: Group | None) -> None:
        """The group whose failures concern this rank from now on; None for none; local."""
        with self._lock:
            self._group = group
            self._cause = None
            if group is None:
                return
            self._early = {
                serial: failure for serial, failure in self._early.items() if serial >= group.serial
            }
            early = self._early.pop(group.serial, None)
        if early is not None:
            self._abort(group.serial, early)

    def signal(self, name: str) -> None:
        """Note a signal; safe in a signal handler."""
        self._signal = name

    def poll(self) -> bool:
        """Read and serve what has arrived; local. Returns whether anything had."""
        signal, self._signal = self._signal, None
        if signal is not None:
            event = Signalled(self._world.rank, signal)
            self._world.mailbox.post(event, self._coordinator_rank, Tag.EVENT)
        arrived = False
        while (mail := self._world.mailbox.take(Tag.ALERT)) is not None:
            arrived = True
            sender, alert = mail
            if isinstance(alert, Abort):
                self._abort(alert.serial, alert.failure)
            elif isinstance(alert, SendState):
                state = self._keeper.get(alert.trial_id, alert.epoch)
                send_state(self._world.mailbox, state, sender, alert.channel)
            elif isinstance(alert, StopSoon):
                self._stop.set()
        self._world.pump_stores()
        return arrived

    def _abort(self, serial: int, failure: Failure) -> None:
        with self._lock:
            group = self._group
            if group is None or group.serial < serial:
                self._early[serial] = failure
                return
            if group.serial > serial or self._cause is not None:
                return
            self._cause = failure
        group.mark_aborted()

    def _run(self) -> None:
        backoff = Backoff(_LONGEST_SLEEP_SECONDS)
        try:
            while not self._end.is_set():
                if self.poll():
                    backoff.reset()
                backoff.pause()
        except BaseException as error:  # seen by the worker at its next wait
            self.fault = error

    def serve(self) -> None:
        """To be called from the rank's own waits: polls where no thread does; local.

        Raises:
            BaseException: What ended the agent's thread.
        """
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        if self._thread is None:
            self.poll()

    def __enter__(self) -> Agent:
        if self._world.threads_may_call:
            self._thread = threading.Thread(target=self._run, name="mpihpo agent", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
