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
from mpihpo.errors import CommError, InternalError, LossElsewhere, TeardownError

T = TypeVar("T")

NODE_NAME_VARIABLE = "MPIHPO_NODE_NAME"
"""Overrides the node's name, for containers whose host names are all the same."""
_SLURM_NODE_NAME_VARIABLE = "SLURMD_NODENAME"

PATIENCE_SECONDS = 60.0
"""After an error other ranks are waited for so long: one may be stuck."""


class World:
    """Private duplicates of a communicator, with its mailbox, its nodes and its registry.

    Use it as a context manager; leaving is collective over the world.

    Args:
        comm: Any intracommunicator; it is duplicated and never used otherwise.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._was_larger = False
        self._set_up(comm)

    def _set_up(self, comm: MPI.Intracomm) -> None:
        self.comm = InterruptibleComm(comm.Dup())
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm.Set_name("mpihpo world")
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.threads_may_call: bool = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self.tag_limit = int(self.comm.Get_attr(MPI.TAG_UB) or 32767)  # what MPI promises at least
        self.node_names: tuple[str, ...] = _node_names(self.comm.allgather(_own_names()))
        """Name of each world rank's node."""
        self.node_of: tuple[int, ...] = _numbered(self.node_names)
        """Number of each world rank's node, by first appearance."""
        self.lost: frozenset[int] = frozenset()
        """World ranks that the others end without."""
        self.meeting: InterruptibleComm = self.comm
        """For collectives of all ranks that are not lost."""
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

        It waits for ranks that are lost and live, and Open MPI's at times for one that has died.
        Then ``os._exit`` ends the process: Open MPI's launcher hands on its status.
        """
        return not (self.lost or self.dead or self._was_larger)

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
        self, lost: Collection[int] = (), timeout_seconds: float = PATIENCE_SECONDS
    ) -> InterruptibleComm:
        """A communicator over all ranks but those in ``lost`` and the dead, in the old order.

        Collective over these ranks. It stays until the process ends.

        Args:
            lost: Ranks that live but take part in nothing any more; the same on every rank.
            timeout_seconds: How long to wait for the others.

        Raises:
            CommError: Not all came in time, or one died meanwhile.
        """
        apart = frozenset(lost)

        def ranks() -> tuple[int, ...]:
            return tuple(rank for rank in range(self.size) if rank not in apart | self.dead)

        self._met += 1
        try:
            made = self.parent.meet_and_make(
                # Groups have the tags below.
                *("survivors", self._met, ranks, self.tag_limit),
                timeout_seconds=timeout_seconds,
            )
        except LossElsewhere as error:
            raise CommError(str(error)) from error
        made.Set_name("mpihpo survivors")
        self.registry.keep(made)
        return InterruptibleComm(made)

    def set_aside(self, ranks: Collection[int]) -> None:
        """End without these ranks, which never come; collective over the others.

        Raises:
            CommError: Not all of them came in time.
        """
        if ranks:
            self.lost = frozenset(ranks)
            self.meeting = self.survivors(ranks)

    @property
    def survivor(self) -> int:
        """The lowest world rank that is not lost."""
        return min(set(range(self.size)).difference(self.lost, self.dead))

    def shrink(self, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """Become the world of the ranks that live, numbered anew; collective over them.

        Raises:
            CommError: Not all of them came in time.
        """
        comm = self.survivors(timeout_seconds=timeout_seconds)
        self.leave()
        self._was_larger = True
        self._set_up(MPI.Intracomm(comm))

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Free the duplicates; collective over the ranks not lost. A second time does nothing.

        Where ranks have died or are lost nothing is freed, since that takes all.

        Args:
            timeout_seconds: How long to wait for the other ranks; None: until they are here.

        Returns:
            Whether they came; if not, everything is left as it is.

        Raises:
            TeardownError: Communicators or process groups are left over.
        """
        if self._is_closed:
            return True
        have_come = None
        if not self.lost and not self.dead:
            have_come = self._close_together(timeout_seconds)
        if have_come is None:
            have_come = self._close_apart(timeout_seconds)
        self._is_closed = True
        if have_come and (live := self.registry.live):
            raise TeardownError(f"left over at the end: {', '.join(live)}")
        return have_come

    def _close_together(self, timeout_seconds: float | None) -> bool | None:
        """Free the duplicates; None: a rank died meanwhile. Collective over the world."""
        # Late words for groups that are gone. A long one leaves its sender only when it is
        # received, so that every rank receives until all are here with nothing more to send.
        try:
            self._discard_until(self.mailbox.flushed, timeout_seconds)
            request = self.comm.Ibarrier()
            if not self._discard_until(request.Test, timeout_seconds):
                self.registry.keep(request)
                self.leave()
                return False
        except MPI.Exception as error:
            self.deaths.met(error)
            return None
        self.mailbox.discard_all()
        MPI.Comm.Free(self.comm)
        self.parent.free()
        return True

    def _close_apart(self, timeout_seconds: float | None) -> bool:
        """Send what is left and keep the duplicates; collective over the ranks that are left."""
        try:
            comm = self.survivors(self.lost) if self.meeting is self.comm else self.meeting
            self._discard_until(lambda: self.mailbox.flushed(self.lost), PATIENCE_SECONDS)
            request = comm.Ibarrier()
            self.registry.keep(request)
            return self._discard_until(request.Test, timeout_seconds)
        except CommError:
            return False
        except MPI.Exception as error:
            self.deaths.met(error)  # the others see it too, and end in the same way
            return True
        finally:
            self.leave()

    def leave(self) -> None:
        """The end without the others: keep all until the process ends; local."""
        if not self._is_closed:
            self._is_closed = True
            self.mailbox.discard_all()
            self.parent.leave()
            self.registry.keep((self.comm, self.meeting, self.mailbox))

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
