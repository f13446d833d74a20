"""A group: one evaluation's sub-communicator and the process group over the same ranks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpihpo.comm.interruptible import InterruptibleComm
from mpihpo.errors import GroupAborted, TeardownError

if TYPE_CHECKING:
    from mpihpo.comm.process_group import DefaultGroup
    from mpihpo.comm.world import World

BUILD_TIMEOUT_SECONDS = 300.0


class Group:
    """The ranks of one evaluation while it lasts.

    Building is collective over the members only: no other rank takes part, so a running trial never
    waits for another one's re-split. A group of one rank makes no traffic.

    Args:
        world: The world the ranks belong to.
        serial: Unique and growing on every member.
        ranks: World ranks of the members, the leader first.
        backend: ``nccl``, ``gloo`` or None for no process group.
    """

    def __init__(
        self, world: World, serial: int, ranks: tuple[int, ...], backend: str | None
    ) -> None:
        self.world = world
        self.serial = serial
        self.ranks = ranks
        self.rank = ranks.index(world.rank)
        self.size = len(ranks)
        # A lone rank has a group for code that asks torch for one; NCCL would take 512 MiB for it.
        self.backend = "gloo" if self.size == 1 and backend else backend
        self._comm: InterruptibleComm | None = None
        self._process_group: DefaultGroup | None = None
        self._aborted = threading.Event()
        self._lock = threading.Lock()

    @property
    def comm(self) -> InterruptibleComm:
        """The communicator over the members, in the order of ``ranks``; local.

        The one of a one-rank group is made when it is first asked for.
        """
        if self._comm is None:
            self._make_comm()
        assert self._comm is not None
        return self._comm

    @property
    def is_aborted(self) -> bool:
        """Whether a member has failed."""
        return self._aborted.is_set()

    def check(self) -> None:
        """Serve the rank, then raise `GroupAborted` if a member has failed or died; local."""
        self.world.serve()
        if self._aborted.is_set():
            raise GroupAborted(f"another rank of group {self.serial} failed")
        if self.world.dead and (dead := self.world.dead.intersection(self.ranks)):
            raise GroupAborted(f"rank {min(dead)} of group {self.serial} died")

    def build(self) -> None:
        """Build the communicator and the process group; collective over the members.

        Raises:
            CommError: One of them could not be built.
            GroupAborted: A member failed meanwhile.
        """
        if self.size > 1:
            self._make_comm()
        if self.backend is None:
            return
        from mpihpo.comm.process_group import DefaultGroup

        process_group = DefaultGroup(
            self.world.store_mail,
            self.serial,
            self.ranks,
            self.rank,
            backend=self.backend,
            timeout_seconds=BUILD_TIMEOUT_SECONDS,
            check=self.check,
        )
        with self._lock:
            self._process_group = process_group
        self.check()
        process_group.build()
        self.world.registry.opened("process group", self.serial)

    def _make_comm(self) -> None:
        parent, tag = self.world.parent, self.serial % self.world.tag_limit
        if self.size > 1 and self.world.survives_deaths:
            made = parent.meet_and_make(
                *("group", self.serial, lambda: self.ranks, tag),
                check=self.check,
                timeout_seconds=BUILD_TIMEOUT_SECONDS,
            )
        elif self.size > 1:
            made = parent.make(self.ranks, tag)
        else:
            made = MPI.COMM_SELF.Dup()  # where ranks die, the parent may be waiting for others
            made.Set_errhandler(MPI.ERRORS_RETURN)
        made.Set_name(f"mpihpo group {self.serial}")
        comm = InterruptibleComm(made)
        comm.check = self.check
        self.world.registry.opened("communicator", self.serial)
        self._comm = comm

    def mark_aborted(self) -> None:
        """A member failed: make this rank's waits and collectives fail; local, from any thread."""
        self._aborted.set()
        with self._lock:
            if self._process_group is not None:
                self._process_group.release()

    def free(self) -> None:
        """The normal end; collective over the members.

        Raises:
            TeardownError: Something could not be freed.
            GroupAborted: A member failed meanwhile.
        """
        if self._process_group is not None and self.size > 1:
            # A member that is still building it, or in its last collective, needs the connections;
            # and all ranks of an NCCL communicator destroy it or all abort it; mixed, they hang.
            self.comm.Barrier()
        with self._lock:
            process_group, self._process_group = self._process_group, None
        if process_group is not None:
            process_group.destroy()
            self.world.registry.closed("process group", self.serial)
        self._free_comm()

    def abort(self) -> None:
        """The end after a failure on any member; local, never waits for another rank."""
        self._aborted.set()
        with self._lock:
            process_group, self._process_group = self._process_group, None
        if process_group is not None:
            process_group.abort()
            self.world.registry.closed("process group", self.serial)
        if self.size == 1:
            self._free_comm()
        else:
            self._set_comm_aside()

    def _set_comm_aside(self) -> None:
        """Keep it until the process ends, never free it; local.

        A later communicator would be given its context, and receive what members of this one still
        sent each other. And MPI may still write into the buffers of what was left half-way.
        """
        comm, self._comm = self._comm, None
        if comm is not None:
            self.world.registry.keep(comm)
            self.world.registry.closed("communicator", self.serial)

    def _free_comm(self) -> None:
        comm, self._comm = self._comm, None
        if comm is None:
            return
        try:
            MPI.Comm.Free(comm)
        except MPI.Exception as error:
            raise TeardownError(f"communicator over ranks {self.ranks}: {error}") from error
        finally:
            self.world.registry.closed("communicator", self.serial)
