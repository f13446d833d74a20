"""A communicator whose blocking calls can be left: what a training function gets as ``trial.comm``.

Without ULFM nothing releases a rank from a blocking MPI call whose peer has failed. Each blocking
call is therefore made of its non-blocking form, a test and a growing sleep, and between two tests a
check may raise. Python-object collectives are built from the buffer ones.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import FunctionType
from typing import Any, Literal, TypeVar

import numpy as np
from mpi4py import MPI

from mpihpo.comm.waiting import wait_until

T = TypeVar("T")

_COLLECTIVES = (
    *("Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv"),
    *("Alltoall", "Alltoallv", "Alltoallw", "Reduce", "Allreduce"),
    *("Reduce_scatter_block", "Scan", "Exscan"),
)
_MAKERS = ("Dup", "Clone", "Split", "Split_type", "Create", "Create_group")


class InterruptibleComm(MPI.Intracomm):
    """An intracommunicator whose waits call ``check``, which may raise to leave them.

    Requests that were left are kept with their buffers, since MPI may still write there.
    """

    check: Callable[[], None] | None = None
    _left: list[Any]

    def __new__(cls, comm: MPI.Comm | None = None) -> InterruptibleComm:
        """Wrap the handle of ``comm``; local."""
        self = super().__new__(cls, comm)
        self._left = []
        return self

    def _wait(self, request: MPI.Request, *keep: object, status: MPI.Status | None = None) -> None:
        try:
            wait_until(lambda: request.Test(status), check=self.check)
        except BaseException:
            self._left.append((request, keep))
            raise

    @property
    def left(self) -> int:
        """How many requests were left unfinished."""
        return len(self._left)

    # Point to point.

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """As `MPI.Comm.Send`, interruptible."""
        self._wait(self.Isend(buf, dest, tag), buf)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """As `MPI.Comm.Ssend`, interruptible."""
        self._wait(self.Issend(buf, dest, tag), buf)

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """As `MPI.Comm.Recv`, interruptible."""
        request = self.Irecv(buf, source, tag)
        try:
            wait_until(lambda: request.Test(status), check=self.check)
        except BaseException:
            request.Cancel()
            request.Wait()
            raise

    def Probe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Literal[True]:
        """As `MPI.Comm.Probe`, interruptible."""
        wait_until(lambda: self.Iprobe(source, tag, status), check=self.check)
        return True

    def Mprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MPI.Message:
        """As `MPI.Comm.Mprobe`, interruptible."""
        return self._matched(self.Improbe, source, tag, status)

    def probe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Literal[True]:
        """As `MPI.Comm.probe`, interruptible."""
        return self.Probe(source, tag, status)

    def mprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MPI.Message:
        """As `MPI.Comm.mprobe`, interruptible."""
        return self._matched(self.improbe, source, tag, status)

    def _matched(self, probe: Callable[..., MPI.Message | None], *arguments: Any) -> MPI.Message:
        found: list[MPI.Message] = []

        def arrived() -> bool:
            message = probe(*arguments)
            if message is not None:
                found.append(message)
            return message is not None

        wait_until(arrived, check=self.check)
        return found[0]

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """As `MPI.Comm.Sendrecv`, interruptible."""
        request = self.Isend(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag, status)
        self._wait(request, sendbuf)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """As `MPI.Comm.Sendrecv_replace`, interruptible where MPI is of version 4 or newer."""
        try:
            request = self.Isendrecv_replace(buf, dest, sendtag, source, recvtag)
        except NotImplementedError:
            super().Sendrecv_replace(buf, dest, sendtag, source, recvtag, status)
            return
        self._wait(request, buf, status=status)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """As `MPI.Comm.send`, interruptible."""
        request = self.isend(obj, dest, tag)
        self._wait(request)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """As `MPI.Comm.ssend`, interruptible."""
        self._wait(self.issend(obj, dest, tag))

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """As `MPI.Comm.recv`, interruptible; ``buf`` is not needed and not used."""
        return self.mprobe(source, tag, status).recv()

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """As `MPI.Comm.sendrecv`, interruptible."""
        request = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        self._wait(request)
        return received

    # A collective that begins with another one.

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """As `MPI.Comm.Reduce_scatter`, interruptible."""
        if recvcounts is None:  # mpi4py would gather them by a call that cannot be left
            recvcounts = self.allgather(_length(recvbuf))
        request = self.Ireduce_scatter(sendbuf, recvbuf, recvcounts, op)
        self._wait(request, sendbuf, recvbuf, recvcounts)

    # Collectives of Python objects, over the buffer ones.

    def barrier(self) -> None:
        """As `MPI.Comm.barrier`, interruptible."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """As `MPI.Comm.bcast`, interruptible."""
        data = bytearray(pickle.dumps(obj)) if self.rank == root else bytearray()
        length = np.array([len(data)], dtype=np.int64)
        self.Bcast(length, root)
        if self.rank != root:
            data = bytearray(int(length[0]))
        self.Bcast([data, MPI.BYTE], root)
        return obj if self.rank == root else pickle.loads(data)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """As `MPI.Comm.gather`, interruptible."""
        data = pickle.dumps(sendobj)
        lengths = np.zeros(self.size, dtype=np.int64) if self.rank == root else None
        self.Gather(np.array([len(data)], dtype=np.int64), lengths, root)
        if lengths is None:
            self.Gatherv([data, MPI.BYTE], None, root)
            return None
        received = bytearray(int(lengths.sum()))
        self.Gatherv([data, MPI.BYTE], [received, (lengths, _starts(lengths)), MPI.BYTE], root)
        return _unpickled(received, lengths)

    def allgather(self, sendobj: Any) -> list[Any]:
        """As `MPI.Comm.allgather`, interruptible."""
        data = pickle.dumps(sendobj)
        lengths = np.zeros(self.size, dtype=np.int64)
        self.Allgather(np.array([len(data)], dtype=np.int64), lengths)
        received = bytearray(int(lengths.sum()))
        self.Allgatherv([data, MPI.BYTE], [received, (lengths, _starts(lengths)), MPI.BYTE])
        return _unpickled(received, lengths)

    def alltoall(self, sendobj: Any) -> list[Any]:
        """As `MPI.Comm.alltoall`, interruptible."""
        parts = [pickle.dumps(item) for item in sendobj]
        sent = np.array([len(part) for part in parts], dtype=np.int64)
        lengths = np.zeros(self.size, dtype=np.int64)
        self.Alltoall(sent, lengths)
        received = bytearray(int(lengths.sum()))
        self.Alltoallv(
            [b"".join(parts), (sent, _starts(sent)), MPI.BYTE],
            [received, (lengths, _starts(lengths)), MPI.BYTE],
        )
        return _unpickled(received, lengths)

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """As `MPI.Comm.scatter`, interruptible."""
        parts = [pickle.dumps(item) for item in sendobj] if self.rank == root else []
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        length = np.zeros(1, dtype=np.int64)
        self.Scatter(lengths if self.rank == root else None, length, root)
        received = bytearray(int(length[0]))
        send = [b"".join(parts), (lengths, _starts(lengths)), MPI.BYTE] if parts else None
        self.Scatterv(send, [received, MPI.BYTE], root)
        return pickle.loads(received)

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        """As `MPI.Comm.reduce`, interruptible; folded in the order of the ranks."""
        values = self.gather(sendobj, root)
        return None if values is None else list(accumulate(values, op))[-1]

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """As `MPI.Comm.allreduce`, interruptible; folded in the order of the ranks."""
        return list(accumulate(self.allgather(sendobj), op))[-1]

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """As `MPI.Comm.scan`, interruptible."""
        return list(accumulate(self.allgather(sendobj), op))[self.rank]

    def exscan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """As `MPI.Comm.exscan`, interruptible; None on rank 0."""
        folded = list(accumulate(self.allgather(sendobj), op))
        return folded[self.rank - 1] if self.rank else None


def _length(buffer: Any) -> int:
    """Number of elements that a buffer, or a list of a buffer and its count, names."""
    parts = list(buffer) if isinstance(buffer, (list, tuple)) else [buffer]
    if len(parts) > 1 and isinstance(parts[1], int):
        return parts[1]
    return int(np.asarray(parts[0]).size)


def _starts(lengths: Any) -> Any:
    return np.concatenate(([0], np.cumsum(lengths)[:-1]))


def _unpickled(data: bytearray, lengths: Any) -> list[Any]:
    view = memoryview(data)
    starts = _starts(lengths)
    return [
        pickle.loads(view[start : start + length])
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]


def _interruptible(name: str) -> Callable[..., None]:
    start = getattr(MPI.Intracomm, "I" + name[0].lower() + name[1:])

    def call(self: InterruptibleComm, *args: Any, **kwargs: Any) -> None:
        self._wait(start(self, *args, **kwargs), args, kwargs)

    call.__doc__ = f"As `MPI.Comm.{name}`, interruptible."
    return _named(call, name)


def _inheriting(name: str) -> Callable[..., MPI.Comm]:
    make = getattr(MPI.Intracomm, name)

    def call(self: InterruptibleComm, *args: Any, **kwargs: Any) -> MPI.Comm:
        if name != "Create_group":  # that one is collective over the new members only
            # MPI cannot be left in here, so that it is entered when all ranks have arrived.
            self.Barrier()
        made: MPI.Comm = make(self, *args, **kwargs)
        if made == MPI.COMM_NULL:
            return made
        child = InterruptibleComm(made)
        child.check = self.check
        return child

    call.__doc__ = f"As `MPI.Comm.{name}`; the new communicator is interruptible too."
    return _named(call, name)


def _named(call: Callable[..., T], name: str) -> Callable[..., T]:
    """The function under its name, in stacks as well."""
    call.__name__ = name
    assert isinstance(call, FunctionType)
    call.__code__ = call.__code__.replace(co_name=name)
    return call


for _name in _COLLECTIVES:
    setattr(InterruptibleComm, _name, _interruptible(_name))
for _name in _MAKERS:
    setattr(InterruptibleComm, _name, _inheriting(_name))
