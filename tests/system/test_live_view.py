"""The view on a terminal, behind the real launchers: both hide it from the ranks."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from tests.launch import Mpi, environment
from tests.system.experiments import write_experiment

COLUMNS = 70

TRAIN = """
def train(config, trial):
    for epoch in trial.epochs():
        trial.report(epoch, loss=config["x"])
"""


@pytest.fixture
def command(mpi: Mpi, tmp_path: Path) -> list[str]:
    (tmp_path / "train.py").write_text(TRAIN)
    path = write_experiment(tmp_path, None, train="train.py:train", space={"x": [1, 2, 3]})
    assert mpi.mpiexec is not None
    return [mpi.mpiexec, "-n", "2", mpi.python, "-m", "mpihpo", "run", str(path)]


def on_a_terminal(command: list[str], folder: Path) -> str:
    """What a terminal is sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, COLUMNS, 0, 0))
    chunks: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunks.append(os.read(ours, 65536))
            except OSError:  # nobody writes any more
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=environment({"TERM": "xterm"}),
            cwd=folder,
            timeout=90,
            check=True,
        )
    finally:
        os.close(theirs)
        reader.join(timeout=10)
        os.close(ours)
    return b"".join(chunks).decode()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_on_a_terminal(command: list[str], tmp_path: Path) -> None:
    text = on_a_terminal(command, tmp_path)
    assert "busy ranks" in text
    assert "\x1b[" in text
    assert "3 trials (3 completed) on 2 ranks" in text


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_into_a_pipe(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment({"TERM": "xterm"}),
        cwd=tmp_path,
        timeout=90,
        check=True,
    )
    text = done.stdout.decode()
    assert "\x1b" not in text
    assert text.count("rung=0 epochs=1 ranks=") == 3
