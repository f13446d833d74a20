"""Small Python messages between world ranks: posted without blocking, taken by matched probe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from mpi4py import MPI

from mpihpo.comm.waiting import wait_until


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


FIRST_CHANNEL = 16
"""Tags from here on are channels: each carries one kept state, to the rank that asked for it."""


class Mailbox:
    """Messages over one communicator that nobody else uses. Thread-safe under THREAD_MULTIPLE."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._pending: list[MPI.Request] = []

    def post(self, message: object, rank: int, tag: int) -> None:
        """Send ``message`` to world rank ``rank``; local, returns at once."""
        request = self._comm.isend(message, rank, tag)
        with self._lock:
            self._pending = [request for request in self._pending if not request.Test()]
            self._pending.append(request)

    def post_bytes(self, buffer: Any, rank: int, channel: int) -> None:
        """Send a buffer object; it must not change until it has left. Local, returns at once."""
        request = self._comm.Isend([buffer, MPI.BYTE], rank, channel)
        with self._lock:
            self._pending.append(request)

    def take(self, tag: int) -> tuple[int, Any] | None:
        """The oldest message with this tag and its sender, or None; local."""
        status = MPI.Status()
        message = self._comm.improbe(MPI.ANY_SOURCE, tag, status)
        if message is None:
            return None
        return status.Get_source(), message.recv()

    def receive_bytes(
        self, buffer: Any, rank: int, channel: int, check: Callable[[], None] | None = None
    ) -> None:
        """Receive what `post_bytes` sent into ``buffer``, waiting for it."""
        request = self._comm.Irecv([buffer, MPI.BYTE], rank, channel)
        try:
            wait_until(request.Test, check=check)
        except BaseException:
            request.Cancel()
            request.Wait()
            raise

    def flushed(self) -> bool:
        """Whether everything posted has left; local."""
        with self._lock:
            self._pending = [request for request in self._pending if not request.Test()]
            return not self._pending

    def discard_all(self) -> int:
        """Receive and forget everything that is still unread; local. Returns how many."""
        count = 0
        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
            count += 1
        return count
