"""A short soak, as a user starts it; the table of faults is for both MPIs."""

from __future__ import annotations

import subprocess

import pytest

from tests.launch import MPIS, ROOT, environment


def test_twenty_seconds_of_it() -> None:
    mpi = MPIS[0]
    if mpi.problem:
        pytest.skip(mpi.problem)
    arguments = ["--seconds", "20", "--ranks", "4", "--seed", "3", "--kills", "1"]
    done = subprocess.run(
        [mpi.python, str(ROOT / "benchmarks" / "soak.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment({}),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every trial accounted for" in done.stdout
    assert "1 times killed, 2 jobs: the same as one that was not" in done.stdout
