"""What the README prints runs as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mpihpo import Results
from tests.launch import MPIS, Mpi, run_ranks
from tests.readme import ROOT, write_files


def run_alone(folder: Path, *arguments: str) -> str:
    """What Python prints without a launcher."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_experiment(mpi: Mpi, tmp_path: Path) -> None:
    write_files(tmp_path, "experiment.yaml", "train.py", "read.py")
    plan = run_alone(tmp_path, "-m", "mpihpo", "check", "experiment.yaml", "--ranks", "4")
    assert "ranks per trial" in plan
    run_ranks(mpi, 4, ["-m", "mpihpo", "run", "experiment.yaml"], cwd=tmp_path, timeout=120)
    results = Results(tmp_path / "runs" / "first")
    assert results.ladder["promoted"].tolist() == [4, 2, 1, 0]
    assert results.best is not None
    assert results.best.epochs == 8
    # Predicting zero everywhere has a loss of 0.25: the network has learnt something.
    assert results.best.objective < 0.2
    printed = run_alone(tmp_path, "read.py")
    assert printed.startswith(results.summary().splitlines()[0])
    assert printed.splitlines()[-1].endswith("8 ['model', 'optimizer']")


def test_experiment_inside_a_program(mpi: Mpi, tmp_path: Path) -> None:
    write_files(tmp_path, "two_at_once.py")
    result = run_ranks(mpi, 4, ["two_at_once.py"], cwd=tmp_path)
    assert [out.count("Best(trial=") for out in result.outs] == [1, 1, 0, 0]
    assert result.outs[0] != result.outs[1], "the halves have seeds of their own"


def test_extensions(tmp_path: Path) -> None:
    write_files(tmp_path, "own.yaml", "own.py")
    run_ranks(MPIS[0], 3, ["-m", "mpihpo", "run", "own.yaml"], cwd=tmp_path, timeout=120)
    results = Results(tmp_path / "runs" / "own")
    assert results.ladder["stop"].tolist() == [1, 2, 3]
    widths = dict.fromkeys(range(3), 0)
    for row in results.evaluations:
        widths[int(row["rung"])] = int(row["ranks"])
    assert widths == {0: 1, 1: 1, 2: 3}
