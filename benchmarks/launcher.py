"""Starts a benchmark's own file again on the ranks of an MPI job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS")

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # More ranks than cores; only Open MPI's launcher reads these.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def is_launched() -> bool:
    """Whether a launcher started this process as a rank of a job."""
    return any(name in os.environ for name in _LAUNCHED)


def launch(
    ranks: int,
    arguments: Sequence[str | Path],
    *,
    python: str | Path = sys.executable,
    timeout_seconds: float = 1800,
    environment: dict[str, str] | None = None,
    root: Path = ROOT,
) -> tuple[str, float]:
    """Run ``python *arguments`` on ``ranks`` ranks, with the launcher that lies beside ``python``.

    The ranks import the package that lies in ``root``.

    Returns:
        What it printed, and how many seconds it took from the start of the launcher to its end.

    Raises:
        SystemExit: The job failed; shows what it printed.
    """
    command = [mpiexec(python), "-n", str(ranks), str(python), *map(str, arguments)]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    began = time.perf_counter()
    done = subprocess.run(
        command,
        env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout, seconds


def mpiexec(python: str | Path) -> str:
    """The launcher that belongs to a Python: the one beside it, else the one on the path.

    Raises:
        SystemExit: There is none.
    """
    beside = Path(python).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit(f"no mpiexec beside {python} nor on the path; install an MPI")
    return found
