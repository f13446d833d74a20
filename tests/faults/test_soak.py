"""A short soak, as a user starts it."""

from __future__ import annotations

import subprocess

from tests.launch import ROOT, Mpi, environment


def test_twenty_seconds_of_it(mpi: Mpi) -> None:
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
