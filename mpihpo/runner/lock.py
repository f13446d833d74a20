"""One job at a time writes a run's folder.

File locks fail or lie on parallel file systems, so the lock is a file that is made only if it is
not there, says who made it, and is touched again and again: one that was not touched for long, or
whose process is gone from this host, belongs to a job that was killed.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mpihpo.errors import ExperimentError, ResultsError

NAME = "lock"
TOUCH_SECONDS = 10.0
STALE_SECONDS = 120.0
"""Several missed touches: a file system may lag, a job may be suspended for a moment."""


class RunLock:
    """Holds a run's folder; use as a context manager, on one rank.

    Args:
        directory: The run's folder.
        takes_over: Whoever held it is known to be dead.

    Raises:
        ExperimentError: On entering: another job that is alive holds it; ``where`` is ``output``.
    """

    def __init__(self, directory: Path, *, takes_over: bool = False) -> None:
        self._takes_over = takes_over
        self._path = directory / NAME
        self._directory = directory
        self._touched = 0.0
        self._text = ""

    def __enter__(self) -> RunLock:
        host = platform.node()
        owner = {
            "host": host,
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID"),
            "key": uuid.uuid4().hex,
        }
        self._text = json.dumps(owner)
        for _ in range(2):
            try:
                with self._path.open("x") as file:
                    file.write(self._text)
            except FileExistsError:
                self._clear_stale(host)
                continue
            self._touched = time.monotonic()
            return self
        raise self._refusal("another job")

    def touch(self) -> None:
        """Say that this job is alive; cheap to call often.

        Raises:
            ResultsError: Another job took the folder over while this one was silent.
        """
        now = time.monotonic()
        if now - self._touched < TOUCH_SECONDS:
            return
        self._touched = now
        if (text := self._read()) not in (None, self._text):
            raise ResultsError(f"{self._directory} was taken over by {_name(text)}")
        with suppress(OSError):  # the folder may be full or away for a moment
            os.utime(self._path)

    def _read(self) -> str | None:
        try:
            return self._path.read_text(errors="replace")
        except OSError:
            return None

    def _clear_stale(self, host: str) -> None:
        try:
            text = self._path.read_text(errors="replace")
            age = time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return
        owner = _owner(text)
        is_alive = age < STALE_SECONDS
        if owner.get("host") == host:
            is_alive = _is_running(owner.get("pid"))
        if is_alive and not self._takes_over:
            raise self._refusal(_name(text))
        # Of several jobs that see the same stale lock, one moves it away.
        aside = self._path.with_name(f".{NAME}.{uuid.uuid4().hex}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        moved = aside.read_text(errors="replace")
        if moved != text:  # somebody else had been quicker, and this is the new lock
            with suppress(OSError):
                aside.rename(self._path)
            raise self._refusal(_name(moved))
        aside.unlink()

    def _refusal(self, name: str) -> ExperimentError:
        return ExperimentError(
            "output", f"{self._directory} is in use by {name}; expected a folder of its own"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._read() == self._text:
            self._path.unlink(missing_ok=True)


def _owner(text: str | None) -> dict[str, Any]:
    try:
        owner = json.loads(text or "")
    except ValueError:  # its maker was killed half-way
        return {}
    return owner if isinstance(owner, dict) else {}


def _name(text: str | None) -> str:
    owner = _owner(text)
    if not owner:
        return "another job"
    name = f"process {owner.get('pid')} on {owner.get('host')}"
    return f"{name}, job {owner['job']}" if owner.get("job") else name


def _is_running(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError):  # where there is no /proc
        # Dead, but its parent has not taken notice: in a container perhaps it never will.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True
