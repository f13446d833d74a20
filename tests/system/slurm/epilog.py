"""Removes what killed jobs left in shared memory, as the epilog of many a site does.

MPICH derives the name of its segment from the numbers of job and step: a requeued job would take
its predecessor's for its own, and fail or hang in MPI_Init. ``python epilog.py FOLDER`` removes
those that are no older than the folder and that no process has.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

SETTLED_SECONDS = 1.0  # between making a segment and mapping it


def main(folder: Path) -> None:
    since, now = folder.stat().st_ctime, time.time()
    segments = []
    for segment in Path("/dev/shm").glob("mpich_*"):
        with suppress(OSError):
            status = segment.stat()
            born = min(status.st_mtime, status.st_ctime)
            if since <= born < now - SETTLED_SECONDS:
                segments.append(segment)
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if segments else ():
        with suppress(OSError):
            used += maps.read_text(errors="replace")
    for segment in segments:
        if str(segment) not in used:
            with suppress(OSError):
                segment.unlink()


if __name__ == "__main__":
    with suppress(OSError):  # an epilog that fails takes the node away
        main(Path(sys.argv[1]))
