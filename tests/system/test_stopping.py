"""Signals for those who cannot wait."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.launch import Job, Mpi, start_ranks
from tests.system.experiments import Finished, write_experiment

SLOW = {
    "space": {"seconds": (30, 31)},
    "allocation": {"policy": "fixed", "ranks": 2},
}


def wait_for(path: Path, job: Job, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        assert job.mpiexec.poll() is None, f"the job ended without {path.name}"
        time.sleep(0.01)


def test_a_second_signal_ends_the_job_at_once(mpi: Mpi, tmp_path: Path):
    log = {"log": str(tmp_path)}
    path = write_experiment(tmp_path, "light:slow", **SLOW, arguments=log)
    with start_ranks(mpi, 4, ["-m", "mpihpo", "run", str(path)], cwd=tmp_path) as job:
        wait_for(tmp_path / "run" / "journal.jsonl", job)
        time.sleep(0.5)
        for _ in range(2):
            for rank in range(4):
                with suppress(ProcessLookupError):
                    job.signal(rank, signal.SIGINT)
            time.sleep(1.3)  # sooner it would count as the same one
        result = job.wait(20)
    # Which status that gives is mpiexec's business; what was written down stays whole.
    assert result.seconds < 20
    kinds = [entry["kind"] for entry in Finished(result, tmp_path / "run").journal]
    assert kinds[0] == "experiment"
    assert "finish" not in kinds
