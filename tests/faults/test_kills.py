"""Jobs that are killed at random moments, or stopped too soon, again and again until done."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.faults.comparing import MARKS, check_same, entries, finished
from tests.faults.running import Player, write_job
from tests.faults.train_functions import marks
from tests.launch import Mpi, start_ranks

KILLS = 20
EPOCH_SECONDS = 0.2
EPOCHS = 8 + 4 + 2 * 2
"""Of the whole ladder."""
RANKS = (3, 2, 3, 1, 4)


def test_killed_at_twenty_random_moments(player: Player, mpi: Mpi, tmp_path: Path):
    """Each kill takes back what has not ended; in between, the job must come to do something."""
    rng = random.Random(20)
    path = write_job(tmp_path, {"arguments": {"seconds": EPOCH_SECONDS}})
    kills = attempts = 0
    while True:
        options = ["--resume"] if (tmp_path / "run" / "journal.jsonl").exists() else []
        ranks = RANKS[attempts % len(RANKS)]
        attempts += 1
        done, noted = set(finished(tmp_path)), len(marks.read(tmp_path / MARKS))
        command = ["-m", "mpihpo", "run", str(path), *options]
        with start_ranks(mpi, ranks, command, cwd=tmp_path) as job:
            if kills < KILLS:
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
        if kills == KILLS and entries(tmp_path)[-1]["kind"] == "finish":
            break
    check_same(tmp_path, player.undisturbed({}))
    assert len(finished(tmp_path)) == 8 + 4 + 2


def wait_for_more_marks(folder: Path, than: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while len(marks.read(folder / MARKS)) <= than:
        assert time.monotonic() < end, "nothing was trained"
        time.sleep(0.005)
