"""Jobs that are killed at random moments, or stopped too soon, again and again until done."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.faults.comparing import MARKS, check_same, entries, finished, trained
from tests.faults.running import INTERRUPTED, Player, write_job
from tests.faults.train_functions import marks
from tests.launch import MPIS, Mpi, run_ranks, start_ranks

KILLS, KILLS_OF_SECOND_MPI = 20, 6
EPOCH_SECONDS = 0.2
EPOCHS = 8 + 4 + 2 * 2
"""Of the whole ladder."""
RANKS = (3, 2, 3, 1, 4)


def test_killed_at_random_moments(player: Player, mpi: Mpi, tmp_path: Path):
    """Each kill takes back what has not ended; in between, the job must come to do something."""
    rng = random.Random(20)
    path = write_job(tmp_path, {"arguments": {"seconds": EPOCH_SECONDS}})
    kills, attempts, least = 0, 0, KILLS if mpi is MPIS[0] else KILLS_OF_SECOND_MPI
    while True:
        options = ["--resume"] if (tmp_path / "run" / "journal.jsonl").exists() else []
        ranks = RANKS[attempts % len(RANKS)]
        attempts += 1
        done, noted = set(finished(tmp_path)), len(marks.read(tmp_path / MARKS))
        command = ["-m", "mpihpo", "run", str(path), *options]
        with start_ranks(mpi, ranks, command, cwd=tmp_path) as job:
            if kills < least:
                # Anywhere from the start of the processes on, or from that of the training.
                if rng.random() < 0.5:
                    wait_for_more_marks(tmp_path, noted)
                time.sleep(rng.uniform(0.0, 1.5 * EPOCH_SECONDS))
                assert job.mpiexec.poll() is None, f"the job ended after {kills} kills"
                job.kill()
                kills += 1
            else:
                result = job.wait(60)
                assert result.rc == 0, result.describe()
        trained = {
            (mark["trial"], mark["rung"])
            for mark in marks.read(tmp_path / MARKS)[noted:]
            if mark["what"] == "trained"
        }
        assert not trained & done, "a finished evaluation was trained again"
        if kills == least and entries(tmp_path)[-1]["kind"] == "finish":
            break
    check_same(tmp_path, player.undisturbed(INTERRUPTED))
    assert len(finished(tmp_path)) == 8 + 4 + 2


def wait_for_more_marks(folder: Path, than: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while len(marks.read(folder / MARKS)) <= than:
        assert time.monotonic() < end, "nothing was trained"
        time.sleep(0.005)


def test_a_time_limit_that_is_too_short(player: Player, mpi: Mpi, tmp_path: Path):
    limit = 0.7
    sections = {"limits": {"time": limit}, "arguments": {"seconds": EPOCH_SECONDS / 2}}
    command = ["-m", "mpihpo", "run", str(write_job(tmp_path, sections))]
    earlier, jobs = 0.0, 0
    while True:
        options = ["--resume"] if jobs else []
        result = run_ranks(mpi, 2, [*command, *options], cwd=tmp_path, timeout=30, rc=None)
        jobs += 1
        assert jobs < 10, result.describe()
        assert result.rc in (0, 75), result.describe()
        ends = [entry["t_stop"] for entry in entries(tmp_path) if entry["kind"] == "outcome"]
        assert max(ends) - earlier < limit + EPOCH_SECONDS / 2
        earlier = entries(tmp_path)[-1]["seconds"]
        if result.rc == 0:
            break
        assert entries(tmp_path)[-1]["reason"] == "time limit"
    assert jobs > 1
    assert len(trained(tmp_path)) == EPOCHS
    check_same(tmp_path, player.undisturbed(INTERRUPTED))
