"""Limits and signals: trials leave at the end of an epoch, and everything is written down."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch import Job, Mpi, start_ranks
from tests.system.experiments import Finished, run_experiment, write_experiment

EPOCHS = 100
SLOW = {
    "space": {"seconds": (0.05, 0.06, 0.07, 0.08)},
    "schedule": {"scheduler": "none", "max_epochs": EPOCHS},
    "allocation": {"policy": "fixed", "ranks": 2},
}


def wait_for(path: Path, job: Job, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        assert job.mpiexec.poll() is None, f"the job ended without {path.name}"
        time.sleep(0.01)


def check_stopped(finished: Finished, reason: str, log: Path) -> None:
    """Both running trials, of ranks 0-1 and 2-3, have left at the end of some epoch."""
    assert finished.journal[-1]["kind"] == "finish"
    assert finished.journal[-1]["reason"] == reason
    assert finished.results.reason == reason
    assert f": {reason}\n" in finished.output
    interrupted = [o for o in finished.outcomes if o["ending"] == "interrupted"]
    assert {rank for outcome in interrupted for rank in outcome["ranks"]} == {0, 1, 2, 3}
    assert len(finished.outcomes) == len(interrupted) == 2
    for outcome in interrupted:
        trial, epochs = outcome["trial"], len(outcome["reports"])
        assert 0 < epochs < EPOCHS
        for rank in (0, 1):
            assert (log / f"trial{trial}-rank{rank}-of-2").read_text() == str(epochs)
            assert (log / f"left{trial}-rank{rank}").exists()


@pytest.mark.parametrize(("name", "rank"), [("SIGTERM", 1), ("SIGUSR1", 3), ("SIGINT", 0)])
def test_a_signal_stops_the_job(mpi: Mpi, tmp_path: Path, name: str, rank: int):
    path = write_experiment(tmp_path, "light:slow", **SLOW, arguments={"log": str(tmp_path)})
    with start_ranks(mpi, 4, ["-m", "mpihpo", "run", str(path)], cwd=tmp_path) as job:
        for trial in (0, 1):
            wait_for(tmp_path / f"trial{trial}-rank0-of-2", job)
        job.signal(rank, getattr(signal, name))
        result = job.wait(20)
    assert result.rc == 75, result.describe()
    check_stopped(Finished(result, tmp_path / "run"), name, tmp_path)


def test_the_time_limit_stops_the_job(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        4,
        tmp_path,
        "light:slow",
        **SLOW,
        arguments={"log": str(tmp_path)},
        limits={"time": 0.7},
        rc=75,
    )
    check_stopped(finished, "time limit", tmp_path)
    assert 0.3 < finished.results.wall_seconds < 3  # a trial leaves before an epoch too many


def test_a_trial_that_takes_too_long_fails(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        4,
        tmp_path,
        "light:slow",
        space={"seconds": (0.01, 0.3, 0.02, 0.03)},
        schedule={"scheduler": "none", "max_epochs": 10},
        allocation={"policy": "fixed", "ranks": 2},
        arguments={"log": str(tmp_path)},
        limits={"trial_seconds": 1},
    )
    failure = finished.failures.pop(1)
    assert failure is not None
    assert failure["kind"] == "TrialTimeout"
    assert failure["message"] == "took longer than limits.trial_seconds: 1"
    assert list(finished.failures.values()) == [None] * 3
    assert finished.results.wall_seconds < 2.5


def test_a_second_signal_ends_the_job_at_once(mpi: Mpi, tmp_path: Path):
    log = {"log": str(tmp_path)}
    slow = {**SLOW, "space": {"seconds": (30, 31)}}
    path = write_experiment(tmp_path, "light:slow", **slow, arguments=log)
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


def test_ctrl_c_in_a_terminal(mpi: Mpi, tmp_path: Path):
    """It goes to mpiexec, too, which passes it on in its own way."""
    path = write_experiment(tmp_path, "light:slow", **SLOW, arguments={"log": str(tmp_path)})
    with start_ranks(mpi, 4, ["-m", "mpihpo", "run", str(path)], cwd=tmp_path) as job:
        for trial in (0, 1):
            wait_for(tmp_path / f"trial{trial}-rank0-of-2", job)
        os.killpg(job.mpiexec.pid, signal.SIGINT)
        result = job.wait(20)
    finished = Finished(result, tmp_path / "run")
    assert finished.results.reason in ("SIGINT", "SIGTERM")
    assert finished.journal[-1]["kind"] == "finish"
