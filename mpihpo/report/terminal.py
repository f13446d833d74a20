"""Finds the terminal on which a person watches the job, behind launchers such as mpiexec.

A rank cannot tell from its own output: MPICH's mpiexec hands its ranks pipes, also on a terminal,
and Open MPI's hands them terminals, also when what they write goes to a file. What counts is where
the launcher itself writes. Ranks under srun, whose launcher is on another machine, and systems
without ``/proc`` have only their own output to go by.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TextIO

_LAUNCHERS = ("mpiexec", "mpirun", "hydra_pmi_proxy", "prterun", "prted", "orterun", "orted")
_PROCESSES = Path("/proc")
_PARENT = 1  # place in /proc/PID/stat, counted behind the name


class Terminal:
    """A terminal that a person watches.

    Args:
        path: Its device, or another process's descriptor of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def size(self) -> tuple[int, int]:
        """Columns and lines at this moment; 80 and 24 where the terminal does not say."""
        columns = lines = 0
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOCTTY)
            try:
                columns, lines = os.get_terminal_size(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            pass
        return columns or 80, lines or 24


def find_terminal(stream: TextIO) -> Terminal | None:
    """The terminal on which ``stream`` ends up; None where it is a file, a log or a dumb one."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        descriptor = stream.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        launcher = _launcher()
        if launcher is not None:
            return _terminal(_PROCESSES / str(launcher) / "fd" / "1")
        return Terminal(Path(os.ttyname(descriptor))) if os.isatty(descriptor) else None
    except (OSError, ValueError):
        return None


def _terminal(output: Path) -> Terminal | None:
    """The terminal behind an open descriptor of any process of ours."""
    if not stat.S_ISCHR(output.stat().st_mode):
        return None
    descriptor = os.open(output, os.O_RDONLY | os.O_NOCTTY)
    try:
        return Terminal(output) if os.isatty(descriptor) else None
    finally:
        os.close(descriptor)


def _launcher() -> int | None:
    """The outermost launcher among the processes above this one; None where there is none."""
    found = None
    process = os.getppid()
    while process > 1:
        try:
            text = (_PROCESSES / str(process) / "stat").read_text(errors="replace")
        except OSError:
            break
        name, _, rest = text.partition("(")[2].rpartition(")")
        if name.startswith(_LAUNCHERS):
            found = process
        process = int(rest.split()[_PARENT])
    return found
