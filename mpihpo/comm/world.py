"""The world: the communicator that the runtime was given, duplicated, and what is known of it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from mpi4py import MPI

from mpihpo.comm.deaths import Deaths, job_survives_deaths
from mpihpo.comm.interruptible import InterruptibleComm
from mpihpo.comm.mailbox import Mailbox
from mpihpo.comm.parent import Parent
from mpihpo.comm.registry import Registry
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import InternalError, TeardownError

T = TypeVar("T")

NODE_NAME_VARIABLE = "MPIHPO_NODE_NAME"
"""Overrides the node's name, for containers whose host names are all the same."""


MEETING_SECONDS = 60.0
"""How long ranks wait for each other at the end where some have died or are left out."""


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
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.threads_may_call: bool = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self.tag_limit = int(self.comm.Get_attr(MPI.TAG_UB) or 32767)  # what MPI promises at least
        name = os.environ.get(NODE_NAME_VARIABLE) or MPI.Get_processor_name()
        self.node_names: tuple[str, ...] = tuple(self.comm.allgather(name))
        """Name of each world rank's node."""
        self.node_of: tuple[int, ...] = _numbered(self.node_names)
        """Number of each world rank's node, by first appearance."""
        self.registry = Registry()
        self.deaths = Deaths(self.comm, self.threads_may_call and job_survives_deaths())
        self.mailbox = Mailbox(self.comm, self.deaths)
        # Open MPI's Create_group sends messages of its own with the caller's tag, which the mailbox
        # would take: hence a second communicator.
        self.parent = Parent(comm.Dup(), self.deaths, self.mailbox, self.registry)
        """Makes the communicators of groups."""
        self.serve: Callable[[], None] = lambda: None
        """Called in every wait of this rank, for what no thread of its own may do."""
        self._store_mail: Any = None
        self._is_closed = False
        self._leaves_some_out = False
        self._met = 0

    @property
    def survives_deaths(self) -> bool:
        """Whether the job goes on when a rank dies."""
        return self.deaths.are_survived

    @property
    def dead(self) -> frozenset[int]:
        """Ranks that are known to have died; only grows. Noticed when a rank reads its mail."""
        return self.deaths.dead

    @property
    def may_finalize(self) -> bool:
        """Whether MPI_Finalize is sure to return; after `close`, on every rank.

        It waits for ranks that are left out, and Open MPI's at times for a rank that has died. Then
        ``os._exit`` ends the process: Open MPI's launcher hands on its status.
        """
        return not self.dead and not self._leaves_some_out

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

    def survivors(
        self, lost: Collection[int] = (), timeout_seconds: float = MEETING_SECONDS
    ) -> InterruptibleComm:
        """A communicator over all ranks but those in ``lost`` and the dead, in the old order.

        Collective over these ranks. It stays until the process ends.

        Args:
            lost: Ranks that live but take part in nothing any more; the same on every rank.
            timeout_seconds: How long to wait for the others.

        Raises:
            CommError: Not all came in time.
        """
        apart = frozenset(lost)

        def ranks() -> tuple[int, ...]:
            return tuple(rank for rank in range(self.size) if rank not in apart | self.dead)

        self._met += 1
        made = self.parent.meet_and_make(
            # Groups have the tags below.
            *("survivors", self._met, ranks, self.tag_limit),
            timeout_seconds=timeout_seconds,
        )
        made.Set_name("mpihpo survivors")
        self.registry.keep(made)
        return InterruptibleComm(made)

    def shrunk(self, timeout_seconds: float, lost: Collection[int] = ()) -> MPI.Intracomm:
        """As `survivors`, for a new world; this one is good for nothing more than `leave`."""
        return MPI.Intracomm(self.survivors(lost, timeout_seconds))

    def close(self, without: Collection[int] = ()) -> None:
        """Free the duplicate; collective over the world. A second time does nothing.

        Where ranks died or are left out it is collective over the others, and nothing is freed: MPI
        may still use it.

        Args:
            without: Ranks that live but take no part; the same on every rank.

        Raises:
            TeardownError: Communicators or process groups are left over.
            CommError: Not all ranks that live came in time; only where some died or are left out.
        """
        if self._is_closed:
            return
        self._leaves_some_out = bool(without)
        if without or self.dead or not self._close_together():
            self._close_apart(without)
        self._is_closed = True
        if live := self.registry.live:
            raise TeardownError(f"left over at the end: {', '.join(live)}")

    def _close_together(self) -> bool:
        """Free the duplicates, unless a rank dies meanwhile; collective over the world."""
        # Late words for groups that are gone. A long one leaves its sender only when it is
        # received, so that every rank receives until all are here with nothing more to send.
        try:
            self._discard_until(self.mailbox.flushed)
            self._discard_until(self.comm.Ibarrier().Test)
        except MPI.Exception as error:
            self.deaths.met(error)
            return False
        self.mailbox.discard_all()
        MPI.Comm.Free(self.comm)
        self.parent.free()
        return True

    def _close_apart(self, without: Collection[int]) -> None:
        """Send what is left and keep the duplicates; collective over the other ranks that live."""
        try:
            comm = self.survivors(without)
            self._discard_until(lambda: self.mailbox.flushed(without))
            self._discard_until(comm.Ibarrier().Test)
        except MPI.Exception as error:
            self.deaths.met(error)  # the others see it too, and end in the same way
        finally:
            self.leave()

    def leave(self) -> None:
        """The end without the others: keep all until the process ends; local."""
        if not self._is_closed:
            self._is_closed = True
            self.mailbox.discard_all()
            self.parent.leave()
            self.registry.keep((self.comm, self.mailbox))

    def _discard_until(self, ready: Callable[[], bool]) -> None:
        def discarded_and_ready() -> bool:
            self.mailbox.discard_all()
            return ready()

        wait_until(discarded_and_ready)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _portable(error: Exception) -> Exception:
    """The error, or if it cannot be sent to other ranks one that tells the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return InternalError(f"{type(error).__name__}: {error}")
    return error


def _numbered(names: Iterable[str]) -> tuple[int, ...]:
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
