"""Real jobs of a real Slurm, by the job scripts as they are."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mpihpo import Results
from mpihpo.results.encoding import parse_ranks
from tests.faults.comparing import check_same, entries, finished, trained, trained_rungs
from tests.faults.running import write_job
from tests.launch import MPIS, ROOT, run_ranks
from tests.system.experiments import write_experiment
from tests.system.slurm.cluster import JOB_SCRIPTS, KILL_WAIT_SECONDS, Cluster, Job

DIGITS = ROOT / "mpihpo" / "examples" / "digits.yaml"
SCRIPT = "multi_node.sbatch"
TWO_TASKS = "--ntasks-per-node=2"
# Four trials on four ranks, then two on two ranks each, then one on all: 96 epochs one after the
# other, of which a job that is stopped after 90 has done all but a few.
LONG: dict[str, Any] = {
    "search": {"searcher": "grid", "space": {"x": {"choices": [3, 0, 2, 1]}}},
    "schedule": {"scheduler": "successive_halving", "min_epochs": 24, "max_epochs": 96},
}
HALVING: dict[str, Any] = {
    "schedule": {"scheduler": "successive_halving", "min_epochs": 1, "max_epochs": 8},
}


def write(folder: Path, *, seconds: float, **sections: Any) -> Path:
    """A deterministic experiment whose epochs take so long."""
    arguments = {"seconds": seconds}
    return write_job(folder, {"arguments": arguments, **sections})


def alone(folder: Path, **sections: Any) -> Path:
    """The folder of a run that nothing interrupts."""
    path = write(folder, seconds=0.0, **sections)
    run_ranks(MPIS[0], 2, ["-m", "mpihpo", "run", str(path)], cwd=folder, timeout=60)
    return folder


def write_long(folder: Path, seconds: float) -> None:
    """An experiment that takes ``96 * seconds`` on four ranks."""
    write(folder, seconds=seconds, **LONG)


def write_halving(folder: Path) -> None:
    """An experiment of a few seconds, most of them after its first rung."""
    write(folder, seconds=0.5, **HALVING)


def reasons(folder: Path) -> list[str]:
    """Why each of the jobs in a folder ended that lived to say so."""
    return [entry["reason"] for entry in entries(folder) if entry["kind"] == "finish"]


def output(folder: Path) -> dict[str, str]:
    """Makes a script write where the functions of `tests.faults.comparing` look."""
    return {"MPIHPO_OUTPUT": str(folder / "run")}


def wait_for_rung(job: Job, folder: Path) -> None:
    def is_closed(_: object) -> bool:
        return any(entry["kind"] == "rung" for entry in entries(folder))

    job.wait_for("at its second rung", is_closed, 30)


def seconds_until_no_process(*jobs: Job) -> float:
    began = time.monotonic()
    for job in jobs:
        while left := job.processes():
            assert time.monotonic() - began < 60, f"{left}\n{job.describe()}"
            time.sleep(0.05)
    return time.monotonic() - began


class Slow:
    """Jobs that take a minute by Slurm's clock; they run beside the other tests."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.stopped_by_signal, self.stopped_by_time = folder / "signal", folder / "time"
        # Away from the node that another test takes away.
        options = ("--nodes=2", TWO_TASKS, "--exclude=n4", "--time=1")
        jobs = []
        for path, seconds, signal_option in (
            # Slurm looks every 30 s, and sends what would be due before it looks again.
            (self.stopped_by_signal, 0.5, "--signal=USR1@15"),
            (self.stopped_by_time, 0.6, "--signal=USR1@0"),
        ):
            path.mkdir()
            write_long(path, seconds)
            jobs.append(slurm.submit(SCRIPT, path, *options, signal_option, env=output(path)))
        self.signal_job, self.time_job = jobs


@pytest.fixture(scope="module", autouse=True)
def slow(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Slow:
    return Slow(slurm, tmp_path_factory.mktemp("slow"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alone(tmp_path_factory.mktemp("halving"), **HALVING)


@pytest.fixture(scope="module")
def reference_of_slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alone(tmp_path_factory.mktemp("long"), **LONG)


def test_four_nodes(slurm: Cluster, tmp_path: Path):
    schedule = {"scheduler": "successive_halving", "max_epochs": 8}
    path = write_experiment(tmp_path, "light:counted", space={"x": range(8)}, schedule=schedule)
    command = [MPIS[0].python, "-m", "mpihpo", "run", str(path)]
    printed = slurm.run("srun", "--mpi=pmi2", "-N4", "-n8", TWO_TASKS, *command, cwd=tmp_path)
    assert "8 trials (1 completed, 7 stopped) on 8 ranks" in printed
    nodes = Results(tmp_path / "run").ranks["node"]
    assert list(nodes) == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
    lent = [
        (entry["rung"], parse_ranks(entry["ranks"]))
        for entry in entries(tmp_path)
        if entry["kind"] == "outcome"
    ]
    # One rank, one node, two nodes, all: as few nodes as so many ranks can be on.
    for rung, ranks_and_nodes in enumerate([{(1, 1)}, {(2, 1)}, {(4, 2)}, {(8, 4)}]):
        found = [ranks for each, ranks in lent if each == rung]
        assert {(len(r), len({nodes[rank] for rank in r})) for r in found} == ranks_and_nodes
        assert sorted(rank for ranks in found for rank in ranks) == list(range(8))


def test_a_process_group_across_nodes(slurm: Cluster, tmp_path: Path):
    pytest.importorskip("torch")
    command = ["srun", "--mpi=pmi2", "-N2", "-n2", MPIS[0].python, "-m", "mpihpo", "run"]
    options = ["--output", "run", "--set", "search.trials=2", "--set", "schedule.max_epochs=2"]
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    slurm.run(*command, str(DIGITS), *options, cwd=tmp_path, env=env)
    results = Results(tmp_path / "run")
    assert list(results.ranks["node"]) == ["n1", "n2"]
    assert results.evaluations["ranks"].tolist() == [1, 1, 2]
    assert results.best is not None


@pytest.mark.parametrize("script", sorted(script.name for script in JOB_SCRIPTS.glob("*.sbatch")))
def test_each_script_as_it_is(slurm: Cluster, tmp_path: Path, script: str):
    """But for the number of ranks and the time limit."""
    write(tmp_path, seconds=0.0)
    options = ("--nodes=1", TWO_TASKS, "--time=10")
    job = slurm.submit(script, tmp_path, *options, arguments=["--set", "search.trials=4"])
    job.wait("COMPLETED", 30)
    results = Results(tmp_path / "runs" / job.number)
    assert results.reason == "completed"
    assert len(results.trials) == 4
    assert len(results.ranks) == 2
    assert job.printed().startswith("module load ")
    assert f"checkpoint: {tmp_path}/runs/{job.number}/" in job.printed()


def test_a_wrong_experiment_is_not_requeued(slurm: Cluster, tmp_path: Path):
    write(tmp_path, seconds=0.0, schedule={"max_epochs": 0})
    job = slurm.submit(SCRIPT, tmp_path, "--nodes=1", TWO_TASKS)
    facts = job.wait("FAILED", 30)
    assert (facts["ExitCode"], facts["Restarts"]) == ("2:0", "0"), job.describe()
    assert "schedule.max_epochs" in job.printed()


def test_scancel(slurm: Cluster, tmp_path: Path, reference: Path):
    write_halving(tmp_path)
    options = ("--nodes=4", TWO_TASKS)
    job = slurm.submit(SCRIPT, tmp_path, *options, env=output(tmp_path))
    wait_for_rung(job, tmp_path)
    slurm.run("scancel", job.number)
    seconds = seconds_until_no_process(job)
    sys.stdout.write(f"scancel: no process left after {seconds:.1f} s\n")
    assert seconds < KILL_WAIT_SECONDS - 1  # by themselves, before Slurm kills them
    assert job.wait("CANCELLED", 30)["Restarts"] == "0"
    assert reasons(tmp_path) == ["SIGTERM"]
    assert "Exited with exit code 75" in job.printed()
    before = len(trained(tmp_path))
    # The same command line, and the environment says where to go on.
    job = slurm.submit(SCRIPT, tmp_path, *options, env=output(tmp_path))
    job.wait("COMPLETED", 60)
    assert "resuming after" in job.printed()
    check_same(tmp_path, reference)
    assert len(trained(tmp_path)) == len(trained(reference)) >= before


def test_a_rank_that_is_killed(slurm: Cluster, tmp_path: Path, reference: Path):
    write_halving(tmp_path)
    job = slurm.submit(SCRIPT, tmp_path, "--nodes=3", TWO_TASKS, env=output(tmp_path))
    wait_for_rung(job, tmp_path)
    done = finished(tmp_path)
    os.kill(job.processes()[-1], signal.SIGKILL)
    seconds = seconds_until_no_process(job)
    sys.stdout.write(f"a rank killed: no process left after {seconds:.1f} s\n")
    assert seconds < 30
    facts = job.wait("FAILED", 30)
    assert (facts["ExitCode"], facts["Restarts"]) == ("137:0", "0"), job.describe()
    before = len(trained(tmp_path))
    slurm.submit(SCRIPT, tmp_path, "--nodes=1", TWO_TASKS, env=output(tmp_path)).wait(
        "COMPLETED", 60
    )
    check_gone_on(tmp_path, done, before, reference)


def test_a_node_that_goes_away(slurm: Cluster, tmp_path: Path, reference: Path):
    """One job goes on with the nodes that are left, another one when the node is back."""
    folders = [tmp_path / "resubmitted", tmp_path / "requeued"]
    jobs = []
    for folder, option in zip(folders, ("--no-requeue", "--requeue"), strict=True):
        folder.mkdir()
        write_halving(folder)
        options = ("--nodes=4", TWO_TASKS, option)
        jobs.append(slurm.submit(SCRIPT, folder, *options, env=output(folder)))
    for job, folder in zip(jobs, folders, strict=True):
        wait_for_rung(job, folder)
    done = [finished(folder) for folder in folders]
    slurm.lose("n4")
    try:
        seconds = seconds_until_no_process(*jobs)
        sys.stdout.write(f"a node lost: no process left after {seconds:.1f} s\n")
        assert seconds < 30
        before = [len(trained(folder)) for folder in folders]
        jobs[0].wait("NODE_FAIL", 30)
        options = ("--nodes=3", TWO_TASKS)
        job = slurm.submit(SCRIPT, folders[0], *options, env=output(folders[0]))
        assert job.wait("COMPLETED", 60)["NodeList"] == "n[1-3]"
    finally:
        slurm.restore()
    facts = jobs[1].wait("COMPLETED", 60)
    assert (facts["Restarts"], facts["NodeList"]) == ("1", "n[1-4]")
    assert "DUE TO NODE FAILURE" in jobs[1].printed()
    for each in zip(folders, done, before, strict=True):
        check_gone_on(*each, reference)


def check_gone_on(folder: Path, done: list[tuple[int, int]], before: int, expected: Path) -> None:
    """The first job had finished ``done``, and trained ``before`` epochs in all."""
    assert done
    again = set(trained_rungs(folder)[before:])
    assert not again & set(done)
    check_same(folder, expected)


def test_a_signal_before_the_time_limit(slow: Slow, reference_of_slow: Path):
    facts = slow.signal_job.wait("COMPLETED", 150)
    assert int(facts["Restarts"]) >= 1
    folder = slow.stopped_by_signal
    assert set(reasons(folder)[:-1]) == {"SIGUSR1"}, slow.signal_job.describe()
    assert "DUE TO TIME LIMIT" not in slow.signal_job.printed()
    check_same(folder, reference_of_slow)
    assert len(trained(folder)) == len(trained(reference_of_slow))


def test_the_time_limit_alone(slow: Slow, reference_of_slow: Path):
    facts = slow.time_job.wait("COMPLETED", 150)
    assert int(facts["Restarts"]) >= 1
    folder = slow.stopped_by_time
    assert set(reasons(folder)[:-1]) == {"time limit"}, slow.time_job.describe()
    ended = next(entry["seconds"] for entry in entries(folder) if entry["kind"] == "finish")
    assert 45 < ended < 60
    assert "DUE TO TIME LIMIT" not in slow.time_job.printed()
    check_same(folder, reference_of_slow)
    assert len(trained(folder)) == len(trained(reference_of_slow))
