"""Jobs that are killed at random moments, or stopped too soon, again and again until done."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.comparing import check_same, entries, trained
from tests.faults.killing import kill_until_done
from tests.faults.running import INTERRUPTED, Player, write_job
from tests.launch import MPIS, Mpi, run_ranks

KILLS, KILLS_OF_SECOND_MPI = 20, 4
EPOCH_SECONDS = 0.1
EPOCHS = 8 + 4 + 2 * 2
"""Of the whole ladder."""


def test_killed_at_random_moments(player: Player, mpi: Mpi, tmp_path: Path):
    kills = KILLS if mpi is MPIS[0] else KILLS_OF_SECOND_MPI
    kill_until_done(tmp_path, mpi, random.Random(20), kills)
    check_same(tmp_path, player.undisturbed(INTERRUPTED))


def test_a_time_limit_that_is_too_short(player: Player, mpi: Mpi, tmp_path: Path):
    limit = 0.7
    sections = {"limits": {"time": limit}, "arguments": {"seconds": EPOCH_SECONDS}}
    command = ["-m", "mpihpo", "run", str(write_job(tmp_path, sections))]
    earlier, jobs = 0.0, 0
    while True:
        options = ["--resume"] if jobs else []
        result = run_ranks(mpi, 2, [*command, *options], cwd=tmp_path, timeout=30, rc=None)
        jobs += 1
        assert jobs < 10, result.describe()
        assert result.rc in (0, 75), result.describe()
        ends = [entry["t_stop"] for entry in entries(tmp_path) if entry["kind"] == "outcome"]
        assert max(ends) - earlier < limit + EPOCH_SECONDS
        earlier = entries(tmp_path)[-1]["seconds"]
        if result.rc == 0:
            break
        assert entries(tmp_path)[-1]["reason"] == "time limit"
    assert jobs > 1
    assert len(trained(tmp_path)) == EPOCHS
    check_same(tmp_path, player.undisturbed(INTERRUPTED))
