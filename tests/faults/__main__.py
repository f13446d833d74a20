"""Plays the table of faults and prints it: ``python -m tests.faults [WORDS] [--mpi NAME]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.faults.printing import row_line, summary
from tests.faults.rows import Measured
from tests.faults.running import Player
from tests.faults.table import ROWS
from tests.launch import MPIS, LauncherHung


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="only rows with all of these in group or name")
    parser.add_argument("--mpi", choices=sorted({mpi.name for mpi in MPIS}), help="only this one")
    parser.add_argument("--keep", type=Path, help="a folder for what the jobs leave")
    options = parser.parse_args()
    began = time.monotonic()
    measured: list[Measured] = []
    failed = 0
    told: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="mpihpo-faults-") as folder:
        player = Player(options.keep or Path(folder))
        for mpi in MPIS:
            if mpi.problem or options.mpi not in (None, mpi.name):
                continue
            for row in ROWS:
                text = f"{row.group}: {row.name}"
                if mpi.name not in row.mpis or not all(word in text for word in options.words):
                    continue
                try:
                    measured.append(player.play(row, mpi))
                    line = row_line(measured[-1])
                except (AssertionError, LauncherHung) as error:
                    failed += 1
                    if error is not told:  # of a job that several rows share
                        traceback.print_exc()
                    told = error
                    line = f"{mpi.name}  {text}: OTHERWISE"
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
    sys.stdout.write(summary(measured))
    seconds = time.monotonic() - began
    sys.stdout.write(f"{len(measured)} rows as they must be, {failed} not, {seconds:.0f} s\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
