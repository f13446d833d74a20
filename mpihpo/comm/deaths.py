"""Ranks that die while the others live on: Open MPI under ``mpiexec --with-ft ulfm``.

Elsewhere the launcher ends the job when a rank dies, and nothing here is ever used.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

from mpi4py import MPI

_FT_AFTER = 11
"""Open MPI numbers its attributes in a fixed order: MPI_FT, which mpi4py does not name, comes after
MPI_WIN_MODEL, which is 11."""


def job_survives_deaths() -> bool:
    """Whether the job goes on when one of its ranks dies; local.

    Both the library and the launcher must do their part. Under srun the library alone may be told
    to (by ``OMPI_MCA_mpi_ft_enable``), and then nobody tells it of a death.
    """
    if MPI.get_vendor()[0] != "Open MPI" or "PRTE_LAUNCHED" not in os.environ:
        return False
    if not hasattr(MPI.Comm, "Get_failed") or _FT_AFTER != MPI.WIN_MODEL:
        return False
    try:
        address = MPI.COMM_WORLD.Get_attr(_FT_AFTER + 1)
    except MPI.Exception:  # a library that was built without it
        return False
    return isinstance(address, int) and ctypes.c_int.from_address(address).value != 0


class Deaths:
    """Which ranks of a communicator are known to have died. Thread-safe.

    Args:
        comm: The communicator; a receive from any rank fails on it after a death until that death
            is acknowledged, which is done here.
        are_survived: Whether the job goes on after a death.
    """

    def __init__(self, comm: MPI.Intracomm, are_survived: bool) -> None:
        self.dead: frozenset[int] = frozenset()
        """Ranks of the communicator; only grows."""
        self.are_survived = are_survived
        self.on_news: Callable[[], None] = lambda: None
        """Called, by the thread that met it, after each death."""
        self._comm = comm
        self._lock = threading.Lock()
        self._kinds = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING} if are_survived else set()

    def are_why(self, error: MPI.Exception) -> bool:
        """Whether an MPI call has failed because a rank died."""
        return error.Get_error_class() in self._kinds

    def met(self, error: MPI.Exception) -> None:
        """Note who died, if that is why an MPI call has failed; local.

        Raises:
            MPI.Exception: The error, where it tells of no death.
        """
        if not self.are_why(error):
            raise error
        with self._lock:
            failed, everybody = self._comm.Get_failed(), self._comm.Get_group()
            ranks = failed.Translate_ranks(None, everybody)
            are_new = not self.dead.issuperset(ranks)
            self.dead |= frozenset(ranks)  # before receives work again: who receives knows of it
            self._comm.Ack_failed(len(ranks))
            failed.Free()
            everybody.Free()
        if are_new:
            self.on_news()
