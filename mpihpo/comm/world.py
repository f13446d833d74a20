"""The world: the communicator that the runtime was given, duplicated, and what is known of it."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar, TypeVar

from mpi4py import MPI

from mpihpo.comm.interruptible import InterruptibleComm
from mpihpo.comm.mailbox import Mailbox
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import InternalError, TeardownError

T = TypeVar("T")

NODE_NAME_VARIABLE = "MPIHPO_NODE_NAME"
"""Overrides the node's name, for containers whose host names are all the same."""
_SLURM_NODE_NAME_VARIABLE = "SLURMD_NODENAME"

PATIENCE_SECONDS = 60.0
"""After an error other ranks are waited for so long: one may be stuck."""


class Registry:
    """Counts every communicator and process group: what was opened must be closed at the end."""

    _kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[tuple[str, int]] = set()
        self.total = 0

    def opened(self, kind: str, serial: int) -> None:
        """Note a new one."""
        with self._lock:
            self._open.add((kind, serial))
            self.total += 1

    def closed(self, kind: str, serial: int) -> None:
        """Note that one is gone."""
        with self._lock:
            self._open.discard((kind, serial))

    def keep(self, thing: Any) -> None:
        """Hold something until the process ends because MPI may still use its memory."""
        self._kept.append(thing)

    @property
    def live(self) -> list[str]:
        """What is open, by kind and serial."""
        with self._lock:
            return [f"{kind} {serial}" for kind, serial in sorted(self._open)]


class World:
    """Private duplicates of a communicator, with its mailbox, its nodes and its registry.

    Use it as a context manager; leaving is collective over the world.

    Args:
        comm: Any intracommunicator; it is duplicated and never used otherwise.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = InterruptibleComm(comm.Dup())
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm.Set_name("mpihpo world")
        self.parent: MPI.Intracomm = comm.Dup()
        """Groups are made from it and nothing is sent on it: Open MPI's Create_group sends messages
        of its own with the caller's tag, which the mailbox would take."""
        self.parent.Set_errhandler(MPI.ERRORS_RETURN)
        self.parent.Set_name("mpihpo groups")
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.threads_may_call: bool = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self.tag_limit = int(self.comm.Get_attr(MPI.TAG_UB) or 32767)  # what MPI promises at least
        self.node_names: tuple[str, ...] = _node_names(self.comm.allgather(_own_names()))
        """Name of each world rank's node."""
        self.node_of: tuple[int, ...] = _numbered(self.node_names)
        """Number of each world rank's node, by first appearance."""
        self.dead: frozenset[int] = frozenset()
        self.survives_deaths = False
        self.lost: frozenset[int] = frozenset()
        """World ranks that the others end without."""
        self.meeting: InterruptibleComm = self.comm
        """For collectives of all ranks that are not lost."""
        self.registry = Registry()
        self.mailbox = Mailbox(self.comm)
        self.serve: Callable[[], None] = lambda: None
        """Called in every wait of this rank, for what no thread of its own may do."""
        self._store_mail: Any = None

    @property
    def store_mail(self) -> Any:
        """This rank's reader of store messages; made, and torch imported, on first use."""
        if self._store_mail is None:
            from mpihpo.comm.store import StoreMail

            self._store_mail = StoreMail(self.mailbox)
        return self._store_mail

    def pump_stores(self) -> None:
        """Serve the store of a group that is there; local."""
        if self._store_mail is not None:
            self._store_mail.pump()

    def on_root(self, function: Callable[[], T]) -> T:
        """Run ``function`` on rank 0; every rank gets its value or its exception.

        Collective over the world.
        """
        answer: tuple[bool, Any] | None = None
        if self.rank == 0:
            try:
                answer = (True, function())
            except Exception as error:  # handed to every rank
                answer = (False, _portable(error))
        well, value = self.comm.bcast(answer, 0)
        if well:
            result: T = value
            return result
        raise value

    def agree(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on all; collective over the world."""
        for each in self.comm.allgather(None if error is None else _portable(error)):
            if each is not None:
                raise each

    def set_aside(self, ranks: Collection[int]) -> None:
        """End without these ranks, which never come; collective over the others."""
        if not ranks:
            return
        self.lost = frozenset(ranks)
        members = self.parent.Get_group()
        left = members.Excl(sorted(ranks))
        self.meeting = InterruptibleComm(self.parent.Create_group(left))
        self.meeting.Set_errhandler(MPI.ERRORS_RETURN)
        left.Free()
        members.Free()

    def shrink(self) -> None:
        """Go on without the dead."""
        raise NotImplementedError

    @property
    def survivor(self) -> int:
        """The lowest world rank that is not lost."""
        return min(set(range(self.size)).difference(self.lost))

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Free the duplicates; collective over the ranks not lost. A second time does nothing.

        With lost ranks they are left as they are, since freeing them takes all.

        Args:
            timeout_seconds: How long to wait for the other ranks; None: until they are here.

        Returns:
            Whether they came; if not, everything is left as it is.

        Raises:
            TeardownError: Communicators or process groups are left over.
        """
        if self.comm == MPI.COMM_NULL:
            return True
        # Late words for groups that are gone. A long one leaves its sender only when it is
        # received, so that every rank receives until all are here with nothing more to send.
        if not self.lost:
            self._discard_until(self.mailbox.flushed, timeout_seconds)
        request = self.meeting.Ibarrier()
        if not self._discard_until(request.Test, timeout_seconds):
            self.registry.keep(request)
            self.leave()
            return False
        self.mailbox.discard_all()
        live = self.registry.live
        MPI.Comm.Free(self.meeting)
        if self.lost:
            self.leave()
        else:
            self.parent.Free()
        if live:
            raise TeardownError(f"left over at the end: {', '.join(live)}")
        return True

    def leave(self) -> None:
        """The end without the others: keep all until the process ends; local."""
        if self.comm != MPI.COMM_NULL:
            self.registry.keep((self.comm, self.parent, self.meeting, self.mailbox))
            self.comm = InterruptibleComm(MPI.COMM_NULL)

    def _discard_until(
        self, ready: Callable[[], bool], timeout_seconds: float | None = None
    ) -> bool:
        def discarded_and_ready() -> bool:
            self.mailbox.discard_all()
            return ready()

        return wait_until(discarded_and_ready, timeout_seconds=timeout_seconds)

    def __enter__(self) -> World:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        self.close(None if error is None else PATIENCE_SECONDS)


def _portable(error: Exception) -> Exception:
    """The error, or if it cannot be sent to other ranks one that tells the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return InternalError(f"{type(error).__name__}: {error}")
    return error


def _own_names() -> tuple[str, str]:
    """What this rank's host calls itself, and what Slurm calls it; local."""
    chosen = os.environ.get(NODE_NAME_VARIABLE)
    if chosen:
        return chosen, ""
    return MPI.Get_processor_name(), os.environ.get(_SLURM_NODE_NAME_VARIABLE, "")


def _node_names(names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Name of each rank's node: its host's, or Slurm's where several nodes share a host's name.

    Never Slurm's alone: mpiexec hands the first node's environment on to the ranks of all nodes.
    """
    names = tuple(names)
    of_slurm: dict[str, set[str]] = {}
    for host, slurm in names:
        of_slurm.setdefault(host, set()).update(filter(None, [slurm]))
    return tuple(slurm if slurm and len(of_slurm[host]) > 1 else host for host, slurm in names)


def _numbered(names: Iterable[str]) -> tuple[int, ...]:
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
