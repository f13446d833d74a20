"""Small Python messages between world ranks: posted without blocking, taken by matched probe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Any

from mpi4py import MPI

from mpihpo.comm.deaths import Deaths
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import LossElsewhere


class Tag(IntEnum):
    """Who a message is for. One tag per reader, so that readers never take each other's mail."""

    ORDER = 1
    """Coordinator to a rank."""
    EVENT = 2
    """A rank to the coordinator."""
    MEMBER = 3
    """A member of a group to its leader: how the evaluation went."""
    ALERT = 4
    """To a rank's agent, which reads while the rank trains."""
    STORE = 5
    """Keys of a process group's store."""
    EPOCH = 6
    """Leader to the members of its group: go on or stop, at an epoch's boundary."""
    MEET = 7
    """Ranks that wait for each other before they make a communicator."""


FIRST_CHANNEL = 16
"""Tags from here on are channels: each carries one kept state, to the rank that asked for it."""


class Mailbox:
    """Messages over one communicator that nobody else uses. Thread-safe under THREAD_MULTIPLE.

    Where the job survives deaths, what is sent to a dead rank is dropped, and what it sent before
    can still be taken if it is short.

    Args:
        comm: The communicator.
        deaths: Its dead ranks; learns of those that are met here.
    """

    def __init__(self, comm: MPI.Intracomm, deaths: Deaths | None = None) -> None:
        self._comm = comm
        self._deaths = deaths or Deaths(comm, are_survived=False)
        self._lock = threading.Lock()
        self._pending: list[tuple[int, MPI.Request]] = []
        self._look_at = 0  # so many pending sends: see which have left

    def post(self, message: object, rank: int, tag: int) -> None:
        """Send ``message`` to world rank ``rank``; local, returns at once."""
        if rank in self._deaths.dead:
            return
        try:
            request = self._comm.isend(message, rank, tag)
        except MPI.Exception as error:
            self._deaths.met(error)
            return
        with self._lock:
            if len(self._pending) >= self._look_at:
                self._look()
            self._pending.append((rank, request))

    def post_bytes(self, buffer: Any, rank: int, channel: int) -> None:
        """Send a buffer object; it must not change until it has left. Local, returns at once."""
        if rank in self._deaths.dead:
            return
        try:
            request = self._comm.Isend([buffer, MPI.BYTE], rank, channel)
        except MPI.Exception as error:
            self._deaths.met(error)
            return
        with self._lock:
            self._pending.append((rank, request))

    def take(self, tag: int) -> tuple[int, Any] | None:
        """The oldest message with this tag and its sender, or None; local."""
        status = MPI.Status()
        try:
            message = self._comm.improbe(MPI.ANY_SOURCE, tag, status)
            if message is None:
                return None
            return status.Get_source(), message.recv()
        except MPI.Exception as error:
            self._deaths.met(error)
            return None

    def receive_bytes(
        self, buffer: Any, rank: int, channel: int, check: Callable[[], None] | None = None
    ) -> None:
        """Receive what `post_bytes` sent into ``buffer``, waiting for it.

        Raises:
            LossElsewhere: The sender died before all of it had come.
        """
        try:
            request = self._comm.Irecv([buffer, MPI.BYTE], rank, channel)
            try:
                wait_until(request.Test, check=check)
            except BaseException:
                if request != MPI.REQUEST_NULL:
                    request.Cancel()
                    request.Wait()
                raise
        except MPI.Exception as error:
            self._deaths.met(error)
            raise LossElsewhere(f"rank {rank} died while it sent a state") from error

    def flushed(self, without: Collection[int] = ()) -> bool:
        """Whether everything posted to ranks other than these has left; local."""
        with self._lock:
            self._look()
            return all(rank in without for rank, _ in self._pending)

    def _look(self) -> None:
        """Let go of what has left; the caller holds the lock.

        Looking costs what is pending, and is due again when that has doubled.
        """
        self._pending = [posted for posted in self._pending if not self._has_left(posted[1])]
        self._look_at = 2 * len(self._pending)

    def _has_left(self, request: MPI.Request) -> bool:
        try:
            return request.Test()
        except MPI.Exception as error:
            self._deaths.met(error)
            return True

    def discard_all(self) -> int:
        """Receive and forget everything that is still unread; local. Returns how many."""
        count = 0
        status = MPI.Status()
        while True:
            try:
                message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                if message is None:
                    return count
                count += 1
                message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
            except MPI.Exception as error:
                self._deaths.met(error)
