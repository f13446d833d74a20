"""What is done to a running job from outside and to the files of one that has ended; checks."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.faults.comparing import MARKS
from tests.faults.rows import Act
from tests.faults.train_functions import marks
from tests.launch import MPIS, Job, run_ranks
from tests.system.experiments import Finished

STATES = 64
STATE_BYTES = 1 << 20
BUDGET_BYTES = 4 << 20

# To a running job.


def kill_all(job: Job, folder: Path) -> None:
    job.kill()


def signal_all(number: int) -> Act:
    def act(job: Job, folder: Path) -> None:
        for rank in range(job.ranks):
            job.signal(rank, number)

    return act


def ctrl_c(job: Job, folder: Path) -> None:
    """As a terminal does it: to mpiexec, which passes it on in its own way."""
    os.killpg(job.mpiexec.pid, signal.SIGINT)


def second_job(job: Job, folder: Path) -> None:
    """In the same folder; it is refused while the first one goes on."""
    arguments = ["-m", "mpihpo", "run", "experiment.yaml", "--resume"]
    mpi = next(mpi for mpi in MPIS if not mpi.problem)
    result = run_ranks(mpi, 1, arguments, cwd=folder, timeout=20, rc=2)
    assert f"{folder / 'run'} is in use by process {job.pid(0)} on " in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.describe()


def watch_states(job: Job, folder: Path) -> None:
    """The states on the disk keep within the budget, but for those that just came, one per rank."""
    most = 0
    while job.mpiexec.poll() is None:
        found = [size_of(file) for file in (folder / "run" / "checkpoints").glob("trial-*.npz")]
        most = max(most, sum(found))
        limit = BUDGET_BYTES + job.ranks * (STATE_BYTES + 4096)
        assert most < limit, f"{most >> 20} MiB of states on the disk"
        time.sleep(0.01)
    assert most > STATE_BYTES, "no states on the disk"


def size_of(file: Path) -> int:
    with suppress(FileNotFoundError):  # just deleted
        return file.stat().st_size
    return 0


# To what an interrupted job left.


def run_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Changes the content of a file in the run's folder."""

    def act(folder: Path) -> None:
        file = folder / "run" / name
        file.write_bytes(change(file.read_bytes()))

    return act


def append(content: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole + content


def flip_a_byte_of_an_outcome(whole: bytes) -> bytes:
    at = whole.index(b'"kind":"outcome"') + 8
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


def break_every_line(whole: bytes) -> bytes:
    return b"".join(b"?" + line for line in whole.splitlines(keepends=True))


def remove(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = folder / "run" / name
        shutil.rmtree(file) if file.is_dir() else file.unlink()

    return act


def states(folder: Path, epoch: int) -> list[Path]:
    found = sorted((folder / "run" / "checkpoints").glob(f"trial-*-epoch-{epoch}.npz"))
    assert found, f"no states after epoch {epoch}"
    return found


def truncate_states(folder: Path) -> None:
    for file in states(folder, 1):
        file.write_bytes(file.read_bytes()[:-50])


def flip_bytes_of_states(folder: Path) -> None:
    """In the middle, where the arrays are."""
    for file in states(folder, 1):
        content = bytearray(file.read_bytes())
        at = len(content) // 2
        content[at : at + 8] = bytes(byte ^ 255 for byte in content[at : at + 8])
        file.write_bytes(content)


def exchange_states(folder: Path) -> None:
    """Each trial's state is under another one's name."""
    files = states(folder, 1)
    assert len(files) > 1
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)


def put_old_states_for_new_ones(folder: Path) -> None:
    """What is called the state after epoch 2 is that of epoch 1."""
    old = states(folder, 1)[0]
    for file in states(folder, 2):
        trial = file.name.split("-")[1]
        content = old.with_name(f"trial-{trial}-epoch-1.npz")
        shutil.copy(content if content.exists() else old, file)


def change_train_function(folder: Path) -> None:
    with (folder / "whole_jobs.py").open("a") as file:
        file.write("\n# A change.\n")


def file_in_place_of_folder(folder: Path) -> None:
    (folder / "run").write_text("a file")


def bring_back(folder: Path) -> None:
    (folder / "gone").rename(folder / "run")


# Surroundings.


def slurm_ends_in(seconds: float) -> Callable[[Path], Mapping[str, str]]:
    return lambda folder: {"SLURM_JOB_END_TIME": str(time.time() + seconds)}


def pbs_ends_in(seconds: int) -> Callable[[Path], Mapping[str, str]]:
    def env(folder: Path) -> dict[str, str]:
        qstat = folder / "qstat"
        qstat.write_text(f"#!/bin/sh\necho '  Resource_List.walltime = 00:00:{seconds:02}'\n")
        qstat.chmod(0o755)
        return {"PBS_JOBID": "7.here", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    return env


# Checks.


def lasted_less_than(seconds: float) -> Callable[[Finished], None]:
    """Of the job's own time, without the start of its processes."""

    def check(finished: Finished) -> None:
        took = finished.results.wall_seconds
        assert took < seconds, f"{took:.2f} s"
        assert any(outcome["reports"] for outcome in finished.outcomes), "nothing was trained"

    return check


def has_trials(number: int) -> Callable[[Finished], None]:
    def check(finished: Finished) -> None:
        assert len(finished.results.trials) == number
        assert finished.results.reason == "completed"

    return check


def kept_within_memory(finished: Finished) -> None:
    """No rank has grown by what it would have kept without the budget: half of the states."""
    resident: dict[int, list[int]] = {}
    for mark in marks.read(finished.folder.parent / MARKS):
        if mark["what"] == "memory":
            resident.setdefault(mark["world_rank"], []).append(mark["bytes"])
    for rank, values in resident.items():
        grown = max(values) - values[0]
        assert grown < STATES * STATE_BYTES // 4, f"rank {rank} has grown by {grown >> 20} MiB"
    assert finished.results.reason == "completed"
