"""The table as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.faults.rows import Measured


def row_line(measured: Measured) -> str:
    """One row under one MPI."""
    row = measured.row
    seconds = f"{measured.until} after {measured.seconds:.2f} s"
    return (
        f"{measured.mpi:8} {measured.ranks:>6} ranks  {row.group}: {row.name}: "
        f"{measured.outcome}; status {measured.status}; {seconds}"
    )


def summary(measured: Sequence[Measured]) -> str:
    """A Markdown table with one row per group."""
    groups = dict.fromkeys(each.row.group for each in measured)
    lines = [
        "| fault | cases | measured | seconds, median | longest |",
        "|---|---|---|---|---|",
    ]
    for group in groups:
        ours = [each for each in measured if each.row.group == group]
        for until in dict.fromkeys(each.until for each in ours):
            seconds = [each.seconds for each in ours if each.until == until]
            lines.append(
                f"| {group} | {len(seconds)} | until {until} | {statistics.median(seconds):.2f} "
                f"| {max(seconds):.2f} |"
            )
    return "\n".join(lines) + "\n"
