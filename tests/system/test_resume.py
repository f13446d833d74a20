"""Jobs that are killed or stopped, and those that go on in their place."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpihpo import Results
from mpihpo.results.journal import read_journal
from mpihpo.runner.saved_state import saved_states
from tests.launch import Job, Mpi, Result, run_ranks, start_ranks
from tests.system.experiments import Finished, write_experiment

EPOCH_SECONDS = 0.1
LADDER = {"scheduler": "successive_halving", "min_epochs": 1, "max_epochs": 4}
SPACE = {"x": tuple(range(8))}


def write(folder: Path, train: str = "resumable:arrays", /, **sections: Any) -> Path:
    content: dict[str, Any] = {
        "space": SPACE,
        "schedule": LADDER,
        "arguments": {"log": str(folder / "log"), "seconds": EPOCH_SECONDS},
    }
    return write_experiment(folder, train, **{**content, **sections})


def command(path: Path, *options: str) -> list[str]:
    return ["-m", "mpihpo", "run", str(path), *options]


def run(mpi: Mpi, ranks: int, path: Path, *options: str, rc: int = 0) -> Result:
    return run_ranks(mpi, ranks, command(path, *options), cwd=path.parent, timeout=40, rc=rc)


def alone(mpi: Mpi, folder: Path, train: str = "resumable:arrays", /, **sections: Any) -> Path:
    """The folder of a run that nothing interrupts."""
    folder = folder / "alone"
    folder.mkdir()
    path = write(
        folder,
        train,
        **{"arguments": {"log": str(folder / "log"), "seconds": 0.0}, **sections},
    )
    run(mpi, 2, path)
    return folder


def lines(folder: Path) -> list[list[str]]:
    """Trial, rung, epoch and loss of every epoch that was trained, in order."""
    log = folder / "log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def entries(folder: Path) -> Sequence[dict[str, Any]]:
    journal = folder / "run" / "journal.jsonl"
    return read_journal(journal).entries if journal.exists() else ()


def finished(folder: Path) -> list[tuple[int, int]]:
    """Trial and rung of every evaluation that the journal says has finished."""
    return [
        (entry["trial"], entry["rung"])
        for entry in entries(folder)
        if entry["kind"] == "outcome" and entry["ending"] == "finished"
    ]


def check_equal(folder: Path, expected: Path) -> None:
    """The results are those of a run that nothing interrupted, and nothing finished twice."""
    results, other = Results(folder / "run"), Results(expected / "run")
    for name in ("id", "status", "rung", "epochs", "best", "last", "config"):
        assert results.trials[name].tolist() == other.trials[name].tolist(), name
    for name in ("rung", "start", "stop", "evaluated", "failed", "promoted", "best"):
        assert results.ladder[name].tolist() == other.ladder[name].tolist(), name
    assert results.best is not None
    assert other.best is not None
    assert results.best.trial == other.best.trial
    assert results.reason == "completed"
    assert set(Counter(finished(folder)).values()) == {1}
    assert sorted(finished(folder)) == sorted(finished(expected))
    # To the last bit, whenever and however often an epoch was trained.
    assert {tuple(line) for line in lines(folder)} == {tuple(line) for line in lines(expected)}


def wait_for_lines(folder: Path, more: int, job: Job, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while len(lines(folder)) < more and job.mpiexec.poll() is None:
        assert time.monotonic() < end, f"no {more} epochs"
        time.sleep(0.01)


def test_killed_at_random_moments(mpi: Mpi, tmp_path: Path):
    rng = random.Random(20)
    # Long enough that six kills come before the end.
    path = write(tmp_path, arguments={"log": str(tmp_path / "log"), "seconds": 0.4})
    kills = 0
    for attempt in range(20):
        options = ["--resume"] if (tmp_path / "run" / "journal.jsonl").exists() else []
        done, trained, written = finished(tmp_path), len(lines(tmp_path)), len(entries(tmp_path))
        ranks = (3, 2, 3, 1, 4)[attempt % 5]
        with start_ranks(mpi, ranks, command(path, *options), cwd=tmp_path) as job:
            if kills < 6:
                end = time.monotonic() + 20
                while len(entries(tmp_path)) <= written and job.mpiexec.poll() is None:
                    assert time.monotonic() < end
                    time.sleep(0.005)
                time.sleep(rng.uniform(0.0, 0.5))
                job.kill()
                kills += 1
            result = job.wait(30)
        again = {(int(line[0]), int(line[1])) for line in lines(tmp_path)[trained:]}
        assert not again & set(done), "a finished evaluation was trained again"
        if result.rc == 0 and entries(tmp_path)[-1]["kind"] == "finish":
            break
        assert kills < 6 or attempt < 19, result.describe()
    assert kills == 6
    check_equal(tmp_path, alone(mpi, tmp_path))


def test_a_signal_then_another_number_of_ranks(mpi: Mpi, tmp_path: Path):
    schedule = {"scheduler": "none", "max_epochs": 6}
    path = write(tmp_path, space={"x": (0, 1, 2)}, schedule=schedule)
    with start_ranks(mpi, 3, command(path), cwd=tmp_path) as job:
        wait_for_lines(tmp_path, 6, job)
        job.signal(1, signal.SIGTERM)
        result = job.wait(20)
    assert result.rc == 75, result.describe()
    trained = lines(tmp_path)
    assert [entry["ending"] for entry in entries(tmp_path) if entry["kind"] == "outcome"] == [
        "interrupted"
    ] * 3
    result = run(mpi, 2, path, "--resume")
    assert "resuming after 3 outcomes" in result.outs[0]
    # Each trial goes on after the epoch at which it left.
    assert len(lines(tmp_path)) == 18
    assert not {tuple(line) for line in trained} & {
        tuple(line) for line in lines(tmp_path)[len(trained) :]
    }
    check_equal(tmp_path, alone(mpi, tmp_path, space={"x": (0, 1, 2)}, schedule=schedule))


def test_a_time_limit_that_is_too_short(mpi: Mpi, tmp_path: Path):
    limit = 0.7
    path = write(tmp_path, limits={"time": limit})
    earlier, jobs = 0.0, 0
    while True:
        options = ["--resume"] if jobs else []
        result = run_ranks(mpi, 2, command(path, *options), cwd=tmp_path, timeout=30, rc=None)
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
    assert len(lines(tmp_path)) == 8 + 4 + 2 * 2
    check_equal(tmp_path, alone(mpi, tmp_path))


def test_a_trial_without_state_goes_on_as_well(mpi: Mpi, tmp_path: Path):
    schedule = {"scheduler": "none", "max_epochs": 6}
    path = write(tmp_path, "resumable:stateless", space={"x": (0, 1)}, schedule=schedule)
    with start_ranks(mpi, 2, command(path), cwd=tmp_path) as job:
        wait_for_lines(tmp_path, 4, job)
        job.signal(0, signal.SIGUSR1)
        assert job.wait(20).rc == 75
    run(mpi, 1, path, "--resume")
    assert len(lines(tmp_path)) == 12
    assert "lost" not in (tmp_path / "run" / "journal.jsonl").read_text()


def test_a_model_with_its_optimizer(mpi: Mpi, tmp_path: Path):
    pytest.importorskip("torch")
    space = {"lr": (0.01, 0.03)}
    schedule = {"scheduler": "successive_halving", "min_epochs": 2, "max_epochs": 8}
    path = write(tmp_path, "resumable:model", space=space, schedule=schedule)
    with start_ranks(mpi, 1, command(path), cwd=tmp_path) as job:
        wait_for_lines(tmp_path, 5, job)  # in the second rung, which the kill takes back
        job.kill()
    run(mpi, 1, path, "--resume")
    check_equal(tmp_path, alone(mpi, tmp_path, "resumable:model", space=space, schedule=schedule))
    assert len(lines(tmp_path)) > 2 * 2 + 2 + 4  # what was killed was trained again


def test_damaged_files(mpi: Mpi, tmp_path: Path):
    """A state that cannot be read, a torn journal and a lost results file cost work, no results."""
    sections: dict[str, Any] = {
        "space": {"x": (3, 5)},
        "schedule": {**LADDER, "reduction_factor": 4, "min_epochs": 2, "max_epochs": 8},
    }
    path = write(tmp_path, **sections)
    with start_ranks(mpi, 1, command(path), cwd=tmp_path) as job:
        wait_for_lines(tmp_path, 2 * 2 + 1, job)  # in the second rung
        job.signal(0, signal.SIGTERM)
        assert job.wait(20).rc == 75
    directory = tmp_path / "run"
    epoch = max(epoch for _, epoch in saved_states(directory / "checkpoints"))
    assert epoch > 2
    (newest,) = (directory / "checkpoints").glob(f"trial-*-epoch-{epoch}.npz")
    newest.write_bytes(newest.read_bytes()[:-50])
    (directory / "results.h5").unlink()
    with (directory / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"seq":99,"ki')
    result = run(mpi, 2, path, "--resume")
    assert "entries lost: 1 (line " in result.outs[0]
    assert f"its state after epoch {epoch} is lost; it trains again from epoch 3" in result.outs[0]
    check_equal(tmp_path, alone(mpi, tmp_path, **sections))


def test_what_resume_refuses_and_what_there_is_nothing_to_do_for(mpi: Mpi, tmp_path: Path):
    path = write(tmp_path, arguments={"log": str(tmp_path / "log"), "seconds": 0.0})
    directory = tmp_path / "run"

    def refused(*options: str) -> str:
        result = run(mpi, 1, path, *options, rc=2)
        assert not result.stdout
        (line,) = result.stderr.splitlines()
        return line

    assert refused("--resume") == (
        f"mpihpo: output: {directory} holds no journal.jsonl; expected the folder of the run to "
        "resume"
    )
    assert not directory.exists()
    run(mpi, 1, path)
    before = lines(tmp_path)
    table = Results(directory).trials
    assert "holds a run already; expected another folder, or --resume" in refused()

    # Nothing to do, and yet the results are there again.
    shutil.copy(directory / "journal.jsonl", tmp_path / "kept")
    (directory / "results.h5").unlink()
    result = run(mpi, 3, path, "--resume")
    assert lines(tmp_path) == before
    assert Results(directory).trials.tolist() == table.tolist()
    assert Finished(result, directory).entries("finish")[-1]["reason"] == "completed"

    assert refused("--resume", "--set", "search.trials=2") == (
        "mpihpo: search.trials: 2 is fewer than the 8 trials that the run has started already"
    )
    space = {"x": tuple(range(1, 9))}
    write(tmp_path, space=space, arguments={"log": str(tmp_path / "log"), "seconds": 0.0})
    line = refused("--resume").replace(": ", " ")
    assert "search.space.x.choices is [1, 2, 3, 4, 5, 6, 7, 8], was [0, 1, 2, 3" in line
    assert "--force" in line
    run(mpi, 1, path, "--resume", "--force")


def test_two_jobs_in_one_folder(mpi: Mpi, tmp_path: Path):
    path = write(tmp_path, arguments={"log": str(tmp_path / "log"), "seconds": 60})
    with start_ranks(mpi, 1, command(path), cwd=tmp_path) as job:
        end = time.monotonic() + 20
        while not any(entry["kind"] == "start" for entry in entries(tmp_path)):
            assert time.monotonic() < end
            time.sleep(0.01)
        before = entries(tmp_path)
        result = run(mpi, 1, path, "--resume", rc=2)
        assert f"{tmp_path / 'run'} is in use by process {job.pid(0)} on " in result.stderr
        assert entries(tmp_path) == before
