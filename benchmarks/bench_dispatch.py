"""What an evaluation costs: thousands of one-rank evaluations that return at once.

Started without a launcher it runs everything, under MPICH and, where a second Python has it, under
Open MPI:

    python benchmarks/bench_dispatch.py [--openmpi-python PATH]

Each job is ``mpihpo.run`` on 4 ranks with ``process_group: none`` and ``scheduler: none``: without
an output folder, with one (journal and results.h5 written), and with evaluations that sleep 50 ms
+- 50 %. On every rank, communicators, descriptors, threads and memory are compared between
evaluation 500 and the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launcher
import machine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpihpo import Trial

OPENMPI_PYTHON_VARIABLE = "MPIHPO_TEST_OPENMPI_PYTHON"
FIRST_SAMPLE = 500
LAST_SAMPLES = 60

_samples: dict[str, dict[str, int]] = {}


# On the ranks.


def train(config: Mapping[str, Any], trial: Trial) -> None:
    """Return at once, or sleep; one epoch, one report."""
    for epoch in trial.epochs():
        if seconds := trial.arguments["sleep"]:
            time.sleep(nap(seconds, trial.seed))
        trial.report(epoch, loss=config["x"])
    if trial.id >= FIRST_SAMPLE and "first" not in _samples:
        _samples["first"] = _sample()
    elif trial.id >= trial.arguments["trials"] - LAST_SAMPLES:
        _samples["last"] = _sample()


def nap(seconds: float, seed: int) -> float:
    """How long an evaluation sleeps: ``seconds`` +- 50 %."""
    return seconds * (0.5 + random.Random(seed).random())


def _sample() -> dict[str, int]:
    """What must not grow on this rank."""
    from mpi4py import MPI

    # Both libraries number handles from the lowest free one, so a leak raises that of a new one.
    probe = MPI.COMM_SELF.Dup()
    handle = probe.py2f()
    probe.Free()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "communicators": handle,
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "python threads": threading.active_count(),
        "memory_kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def job(trials: int, sleep: float, output: str | None) -> None:
    """One job on this process's ranks; rank 0 prints its figures as JSON."""
    from mpi4py import MPI

    import mpihpo

    experiment = {
        "objective": {"metric": "loss"},
        "search": {"trials": trials, "space": {"x": {"lower": 0.0, "upper": 1.0}}},
        "schedule": {"scheduler": "none", "max_epochs": 1},
        "process_group": "none",
        "arguments": {"sleep": sleep, "trials": trials},
    }
    comm = MPI.COMM_WORLD
    comm.Barrier()
    began = time.perf_counter()
    results = mpihpo.run(experiment, train, output=output)
    seconds = time.perf_counter() - began
    samples = comm.gather(_samples, 0)
    if comm.rank != 0 or samples is None:
        return
    evaluations = results.evaluations
    assert len(evaluations) == trials, f"{len(evaluations)} evaluations of {trials}"
    slept = sum(nap(sleep, _seed(trial_id)) for trial_id in range(trials) if sleep)
    figures = {
        "package": machine.package(),
        "mpi": machine.mpi_library(),
        "ranks": comm.size,
        "seconds": seconds,
        "training_seconds": float(evaluations["t_stop"].max() - evaluations["t_start"].min()),
        "slept": slept,
        "growth": _growth(samples),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def _seed(trial_id: int) -> int:
    from mpihpo.agenda import trial_seed

    return trial_seed(0, trial_id)


def _growth(samples: list[dict[str, dict[str, int]]]) -> dict[str, list[int]]:
    """By kind: how much more each rank has at the end than at evaluation 500."""
    both = [sample for sample in samples if "first" in sample and "last" in sample]
    kinds = both[0]["first"] if both else {}
    return {kind: [each["last"][kind] - each["first"][kind] for each in both] for kind in kinds}


# The driver.


def drive(options: argparse.Namespace) -> None:
    """Run every job under every MPI and print a table."""
    print(machine.header("What an evaluation costs"))
    pythons = [sys.executable]
    if options.openmpi_python:
        pythons.append(options.openmpi_python)
    for python in pythons:
        _drive_one(options, python)


def _drive_one(options: argparse.Namespace, python: str) -> None:
    trials, ranks = options.trials, options.ranks
    if not options.sleep_only:
        for title, with_output in (("no output", False), ("journal and results.h5", True)):
            figures, whole = launch_job(python, ranks, trials, with_output=with_output)
            print(f"\n{figures['mpi']}, {ranks} ranks, {trials} evaluations, {title}")
            print(f"  run() alone      {1e3 * figures['seconds'] / trials:8.3f} ms per evaluation")
            print(f"  process included {1e3 * whole / trials:8.3f} ms per evaluation")
            for kind, grown in figures["growth"].items():
                print(f"  growth of {kind:15} {'  '.join(f'{each:+d}' for each in grown)}")
    trials = options.sleep_trials
    if trials:
        figures, _ = launch_job(python, ranks, trials, with_output=True, sleep=options.sleep)
        busy = figures["slept"] / ranks
        print(
            f"\n{figures['mpi']}, {ranks} ranks, {trials} evaluations that sleep "
            f"{options.sleep * 1e3:.0f} ms +- 50 %, journal and results.h5"
        )
        print(f"  busy share of the ranks while training  {busy / figures['training_seconds']:.4f}")
        print(f"  busy share over run()                   {busy / figures['seconds']:.4f}")


def launch_job(
    python: str,
    ranks: int,
    trials: int,
    *,
    with_output: bool,
    sleep: float = 0.0,
    root: Path = launcher.ROOT,
) -> tuple[dict[str, Any], float]:
    """One job with the package in ``root``: its figures, and the seconds of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [__file__, "--job", "--trials", str(trials), "--sleep", str(sleep)]
        if with_output:
            arguments += ["--output", f"{folder}/run"]
        text, seconds = launcher.launch(ranks, arguments, python=python, root=root)
    return json.loads(text.splitlines()[-1]), seconds


def add_openmpi_python(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the second Python."""
    parser.add_argument(
        "--openmpi-python",
        default=os.environ.get(OPENMPI_PYTHON_VARIABLE),
        help=f"a Python with Open MPI beside this one; default: {OPENMPI_PYTHON_VARIABLE}",
    )


def main() -> None:
    """Read the arguments; drive, or be one rank of a job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sleep", type=float, default=0.05, help="mean seconds, default 0.05")
    parser.add_argument("--sleep-trials", type=int, default=1000, help="0: without this part")
    parser.add_argument("--sleep-only", action="store_true")
    add_openmpi_python(parser)
    parser.add_argument("--job", action="store_true", help="be a rank of one job")
    parser.add_argument("--output", help="with --job: the job's output folder")
    options = parser.parse_args()
    if options.job:
        job(options.trials, options.sleep, options.output)
    else:
        drive(options)


if __name__ == "__main__":
    main()
