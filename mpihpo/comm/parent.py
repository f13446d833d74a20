"""The communicator that others are made from, renewed when ranks die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from mpi4py import MPI

from mpihpo.comm.deaths import Deaths
from mpihpo.comm.mailbox import Mailbox
from mpihpo.comm.meeting import Meetings, Terms
from mpihpo.comm.registry import Registry
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import CommError, LossElsewhere


class _Line(NamedTuple):
    """One generation: a communicator and the world rank of each of its ranks."""

    generation: int
    comm: MPI.Intracomm
    ranks: tuple[int, ...]


class Parent:
    """Makes communicators over some ranks of the world. Nothing else is ever sent on it.

    Open MPI makes none from a communicator with a dead member, and a rank that has entered the
    making of one together with a rank that dies never leaves it. So after a death a thread of every
    rank makes the next generation, without the dead; and where a job survives deaths, members meet
    by messages, which can be left, before they enter.

    Args:
        comm: The first generation.
        deaths: Of the world's communicator, which has the same ranks.
        mailbox: Of the world.
        registry: Of the world.
    """

    def __init__(
        self, comm: MPI.Intracomm, deaths: Deaths, mailbox: Mailbox, registry: Registry
    ) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        comm.Set_name("mpihpo groups")
        self._line = _Line(0, comm, tuple(range(comm.Get_size())))
        self._deaths = deaths
        self._registry = registry
        self._meetings = Meetings(mailbox, comm.Get_rank())
        self._lock = threading.Lock()
        self._is_renewing = False
        self._is_closed = False
        self._fault: MPI.Exception | None = None
        deaths.on_news = self._start_renewing

    def make(self, ranks: tuple[int, ...], tag: int) -> MPI.Intracomm:
        """A communicator over ``ranks`` in this order; collective over them, cannot be left."""
        return self._make(self._line, ranks, tag)

    def meet_and_make(
        self,
        kind: str,
        number: int,
        ranks: Callable[[], tuple[int, ...]],
        tag: int,
        *,
        check: Callable[[], None] | None = None,
        timeout_seconds: float,
    ) -> MPI.Intracomm:
        """As `make`, entered when all are there, and with a wait that can be left.

        Args:
            kind: As for `Meetings.meet`.
            number: As for `Meetings.meet`.
            ranks: The members; asked again after each death.
            tag: For MPI; no two communicators that are made at a time have the same.
            check: Called while waiting; whatever it raises ends the wait.
            timeout_seconds: For meeting.

        Raises:
            CommError: Not all came in time.
            LossElsewhere: A rank died meanwhile.
        """

        def terms() -> Terms | None:
            line = self._line
            if self._fault is not None:
                raise CommError(f"no communicator without the dead ranks: {self._fault}")
            is_current = self._deaths.dead.isdisjoint(line.ranks)
            return Terms(line.generation, ranks()) if is_current else None

        agreed = self._meetings.meet(
            kind, number, terms, check=check, timeout_seconds=timeout_seconds
        )
        line = self._line
        if line.generation != agreed.generation:
            raise LossElsewhere(_died_meanwhile(agreed.ranks))
        if not self._deaths.are_survived:
            return self._make(line, agreed.ranks, tag)
        return self._make_in_a_thread(line, agreed.ranks, tag, check)

    def _make(self, line: _Line, ranks: tuple[int, ...], tag: int) -> MPI.Intracomm:
        members = line.comm.Get_group()
        chosen = members.Incl([line.ranks.index(rank) for rank in ranks])
        try:
            return line.comm.Create_group(chosen, tag=tag)
        except MPI.Exception as error:
            if self._deaths.are_why(error):
                raise LossElsewhere(_died_meanwhile(ranks)) from error
            raise CommError(f"communicator over ranks {ranks}: {error}") from error
        finally:
            chosen.Free()
            members.Free()

    def _make_in_a_thread(
        self, line: _Line, ranks: tuple[int, ...], tag: int, check: Callable[[], None] | None
    ) -> MPI.Intracomm:
        """As `_make`, and left when any rank dies meanwhile; the thread then stays in there."""
        made: list[MPI.Intracomm] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                made.append(self._make(line, ranks, tag))
            except Exception as error:  # raised where it was asked for
                errors.append(error)

        def check_members() -> None:
            if check is not None:
                check()
            # Another member may have seen the death before it entered, and will not come.
            if not self._deaths.dead.isdisjoint(line.ranks):
                raise LossElsewhere(_died_meanwhile(ranks))

        thread = threading.Thread(target=run, name="mpihpo communicator", daemon=True)
        thread.start()
        wait_until(lambda: bool(made or errors), check=check_members)
        thread.join()
        if errors:
            raise errors[0]
        return made[0]

    def _start_renewing(self) -> None:
        with self._lock:
            if self._is_renewing or self._is_closed:
                return
            self._is_renewing = True
        threading.Thread(target=self._renew, name="mpihpo renewal", daemon=True).start()

    def _renew(self) -> None:
        """Make generations until one has no dead member; collective over the survivors.

        Each of them enters for the same generations: for those that have a member who died.
        """
        while True:
            line = self._line
            with self._lock:
                if self._is_closed or self._deaths.dead.isdisjoint(line.ranks):
                    self._is_renewing = False
                    return
            try:
                comm = MPI.Intracomm(line.comm.Shrink())
                comm.Set_errhandler(MPI.ERRORS_RETURN)
                before, now = line.comm.Get_group(), comm.Get_group()
                ranks = tuple(line.ranks[old] for old in now.Translate_ranks(None, before))
            except MPI.Exception as error:
                self._fault = error
                return
            self._registry.keep(line.comm)
            self._line = _Line(line.generation + 1, comm, ranks)

    def free(self) -> None:
        """Free it; collective over all ranks of the world, none of which has died."""
        self._is_closed = True
        self._line.comm.Free()

    def leave(self) -> None:
        """Keep it until the process ends; local."""
        with self._lock:
            self._is_closed = True
        self._registry.keep(self._line.comm)


def _died_meanwhile(ranks: tuple[int, ...]) -> str:
    return f"communicator over ranks {ranks}: a rank died meanwhile"
