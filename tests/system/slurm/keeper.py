"""Starts daemons, and when its standard input ends, kills everything that ever came of them.

``python keeper.py FOLDER`` takes one line of JSON per daemon, ``[output, [program, argument...]]``,
and answers with its process id. The pipe ends with whoever holds its other end, also when that
is killed: no process is left then, and the folder is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import epilog  # beside this program

_PR_SET_CHILD_SUBREAPER = 36


def main(folder: str) -> None:
    # What a daemon leaves behind becomes our child, in whichever session or group it is.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    signal.signal(signal.SIGCHLD, lambda number, frame: reap())
    try:
        for line in sys.stdin:
            output, arguments = json.loads(line)
            sys.stdout.write(f"{start(Path(output), arguments, folder)}\n")
            sys.stdout.flush()
    finally:
        end_all()
        time.sleep(epilog.SETTLED_SECONDS)
        epilog.main(Path(folder))
        shutil.rmtree(folder, ignore_errors=True)


def start(output: Path, arguments: list[str], folder: str) -> int:
    with output.open("ab") as file:
        daemon = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )
    return daemon.pid


def end_all() -> None:
    while found := descendants():
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)


def reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in parentheses may hold anything.
            parent = int(status.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = [*children.get(os.getpid(), [])]
    for pid in found:
        found += children.get(pid, [])
    return found


if __name__ == "__main__":
    main(sys.argv[1])
