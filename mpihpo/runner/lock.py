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
from pathlib import Path
from types import TracebackType

from mpihpo.errors import ExperimentError

NAME = "lock"
TOUCH_SECONDS = 10.0
STALE_SECONDS = 120.0
"""Several missed touches: a file system may lag, a job may be suspended for a moment."""


class RunLock:
    """Holds a run's folder; use as a context manager, on one rank.

    Args:
        directory: The run's folder.

    Raises:
        ExperimentError: On entering: another job that is alive holds it; ``where`` is ``output``.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._directory = directory
        self._touched = 0.0

    def __enter__(self) -> RunLock:
        host = platform.node()
        owner = {
            "host": host,
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID"),
        }
        for _ in range(2):
            try:
                with self._path.open("x") as file:
                    json.dump(owner, file)
            except FileExistsError:
                self._clear_stale(host)
                continue
            self._touched = time.monotonic()
            return self
        raise self._refusal("another job")

    def touch(self) -> None:
        """Say that this job is alive; cheap to call often. A failure is no harm by itself."""
        now = time.monotonic()
        if now - self._touched < TOUCH_SECONDS:
            return
        self._touched = now
        try:
            os.utime(self._path)
        except OSError:
            return  # the folder may be full or away for a moment

    def _clear_stale(self, host: str) -> None:
        try:
            owner = json.loads(self._path.read_text())
            age = time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            owner, age = {}, time.time() - self._path.stat().st_mtime
        name = f"process {owner.get('pid')} on {owner.get('host')}"
        if owner.get("job"):
            name += f", job {owner['job']}"
        is_alive = age < STALE_SECONDS
        if owner.get("host") == host:
            is_alive = _is_running(owner.get("pid"))
        if is_alive:
            raise self._refusal(name)
        self._path.unlink(missing_ok=True)

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
        self._path.unlink(missing_ok=True)


def _is_running(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
