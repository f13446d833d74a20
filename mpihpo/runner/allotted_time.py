"""When the batch system will end this job, if it says so."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Mapping

_ASK_SECONDS = 10.0


def seconds_left(environment: Mapping[str, str] | None = None) -> float | None:
    """Seconds until the batch system ends the job; None: no batch system, or no limit; local.

    Slurm tells it in ``SLURM_JOB_END_TIME`` (Unix seconds) or through ``squeue``, PBS through
    ``qstat``. Ask on one rank only: a scheduler does not like to be asked by a thousand.
    """
    environment = os.environ if environment is None else environment
    if end := environment.get("SLURM_JOB_END_TIME"):
        return _until(end)
    if job := environment.get("SLURM_JOB_ID"):
        return _from_slurm(_ask("squeue", "-h", "-j", job, "-O", "TimeLeft"))
    if job := environment.get("PBS_JOBID"):
        return _from_pbs(_ask("qstat", "-f", job))
    return None


def _until(end: str) -> float | None:
    try:
        seconds = float(end)
    except ValueError:
        return None
    return seconds - time.time() if 0 < seconds < math.inf else None


def _from_slurm(answer: str) -> float | None:
    """``D-HH:MM:SS``, ``HH:MM:SS`` or ``MM:SS``; other words mean no limit."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", answer.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _from_pbs(answer: str) -> float | None:
    """``Resource_List.walltime`` less ``resources_used.walltime``, both ``HH:MM:SS``."""
    found = {
        key: int(hours) * 3600 + int(minutes) * 60 + int(seconds)
        for key, hours, minutes, seconds in re.findall(
            r"(Resource_List|resources_used)\.walltime = (\d+):(\d+):(\d+)", answer
        )
    }
    if "Resource_List" not in found:
        return None
    return float(found["Resource_List"] - found.get("resources_used", 0))


def _ask(*command: str) -> str:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
