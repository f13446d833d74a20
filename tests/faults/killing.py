"""Kills a job again and again, and lets it go on, until it is done."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.faults.comparing import MARKS, entries, finished
from tests.faults.running import write_job
from tests.faults.train_functions import marks
from tests.launch import Job, Mpi, start_ranks

EPOCH_SECONDS = 0.2
RANKS = (3, 2, 3, 1, 4)
"""Of one job after the other."""


def kill_until_done(folder: Path, mpi: Mpi, rng: random.Random, kills: int) -> int:
    """Run the job of `write_job` in a folder; returns how many jobs it took.

    Args:
        folder: For the experiment.
        mpi: The MPI.
        rng: Decides the moments: anywhere from the start of the processes on, or soon after the
            job came to train.
        kills: How often it is killed before it may come to its end.

    Raises:
        AssertionError: It hangs, ends too early, or trains again what had finished.
    """
    folder.mkdir(exist_ok=True)
    path = write_job(folder, {"arguments": {"seconds": EPOCH_SECONDS}})
    for attempt in range(kills + 1):
        options = ["--resume"] if (folder / "run" / "journal.jsonl").exists() else []
        done, noted = set(finished(folder)), len(marks.read(folder / MARKS))
        command = ["-m", "mpihpo", "run", str(path), *options]
        with start_ranks(mpi, RANKS[attempt % len(RANKS)], command, cwd=folder) as job:
            if attempt < kills:
                if rng.random() < 0.5:
                    _wait_for_more_marks(job, folder, noted)
                time.sleep(rng.uniform(0.0, 1.5 * EPOCH_SECONDS))
                assert job.mpiexec.poll() is None, f"the job ended after {attempt} kills"
                job.kill()
            else:
                result = job.wait(60)
                assert result.rc == 0, result.describe()
        trained = {
            (mark["trial"], mark["rung"])
            for mark in marks.read(folder / MARKS)[noted:]
            if mark["what"] == "trained"
        }
        assert not trained & done, "a finished evaluation was trained again"
    assert entries(folder)[-1]["kind"] == "finish"
    return kills + 1


def _wait_for_more_marks(job: Job, folder: Path, than: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while len(marks.read(folder / MARKS)) <= than:
        if time.monotonic() > end:
            job.wait(0.1)  # says where its ranks stand
        assert job.mpiexec.poll() is None, "the job ended before it trained"
        time.sleep(0.005)
