"""The table as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.faults.rows import Measured

_NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}


def row_line(measured: Measured) -> str:
    """One row under one MPI."""
    row = measured.row
    seconds = f"{measured.until} after {measured.seconds:.2f} s"
    return (
        f"{measured.mpi:8} {measured.ranks:>6} ranks  {row.group}: {row.name}: "
        f"{measured.outcome}; status {measured.status}; {seconds}"
    )


def summary(measured: Sequence[Measured]) -> str:
    """A Markdown table with one line per group of rows and what was measured."""
    mpis = list(dict.fromkeys(each.mpi for each in measured))
    titles = [f"{_NAMES.get(mpi, mpi)}: cases, seconds" for mpi in mpis]
    lines = [_line("fault", "seconds until", *titles), _line(*["---"] * (2 + len(mpis)))]
    for group, until in dict.fromkeys((each.row.group, each.until) for each in measured):
        ours = [each for each in measured if (each.row.group, each.until) == (group, until)]
        cells = [_cell([each.seconds for each in ours if each.mpi == mpi]) for mpi in mpis]
        lines.append(_line(group, until, *cells))
    return "\n".join(lines) + "\n"


def _cell(seconds: Sequence[float]) -> str:
    """How many, their median and the longest."""
    if not seconds:
        return ""
    return f"{len(seconds)}: {statistics.median(seconds):.2f}, at most {max(seconds):.2f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
