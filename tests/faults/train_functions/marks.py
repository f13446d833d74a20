"""Notes when a training function is entered and when it injects a fault: one JSON line each."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_RANK = "OMPI_COMM_WORLD_RANK" if "OMPI_COMM_WORLD_RANK" in os.environ else "PMI_RANK"
WORLD_RANK = int(os.environ.get(_RANK, "0"))


def path(trial: Any) -> Path:
    return Path(trial.arguments["marks"])


def note(trial: Any, what: str, **fields: Any) -> None:
    """Append a line at once, so that a kill loses nothing of it."""
    line = {
        "what": what,
        "time": time.time(),
        "process": os.getpid(),
        "world_rank": WORLD_RANK,
        "trial": trial.id,
        "rung": trial.rung,
        "rank": trial.rank,
        "start": trial.start,
        **fields,
    }
    # A fault may be that files cannot grow any more; this one must.
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    descriptor = os.open(path(trial), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (json.dumps(line) + "\n").encode())
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))


def read(file: Path) -> list[dict[str, Any]]:
    """All lines so far; one that is being written is left out."""
    if not file.exists():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def is_first(trial: Any) -> bool:
    """Whether no fault was injected into this trial so far."""
    return not any(m["what"] == "fault" and m["trial"] == trial.id for m in read(path(trial)))


def seconds_to_reuse(
    noted: Sequence[Mapping[str, Any]], trial: int, aside: int = 0
) -> float | None:
    """From the first fault of a trial until its ranks have entered their next evaluation.

    Args:
        noted: Lines of the file.
        trial: The trial.
        aside: How many of its ranks never come back.

    Returns:
        The seconds until the last one did; None: one has not so far.
    """
    fault = next(m for m in noted if m["what"] == "fault" and m["trial"] == trial)
    entered = [mark for mark in noted if mark["what"] == "entered"]
    members = {
        mark["process"]
        for mark in entered
        if (mark["trial"], mark["rung"]) == (trial, fault["rung"]) and mark["time"] <= fault["time"]
    }
    again: dict[int, float] = {}
    for mark in entered:
        if mark["process"] in members and mark["time"] > fault["time"]:
            again.setdefault(mark["process"], mark["time"])
    if len(again) < len(members) - aside:
        return None
    return float(max(again.values(), default=fault["time"]) - fault["time"])
