"""Whether a person watches: what counts is where the launcher writes, not the rank."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpihpo.report.terminal import find_terminal

PROGRAM = """
import sys
from mpihpo.report.terminal import find_terminal
found = find_terminal(sys.stdout)
sys.stderr.write("none" if found is None else "{} x {}".format(*found.size()))
"""


@pytest.fixture
def screen() -> Iterator[int]:
    """A terminal of 100 columns and 30 lines: the descriptor that programs write to."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    yield theirs
    os.close(theirs)
    os.close(ours)


def found(stdout: int, launcher: Path | None = None, inner: str = "", term: str = "xterm") -> str:
    """What a rank finds whose launcher writes to ``stdout``; ``inner`` redirects the rank."""
    command = f"{sys.executable} -c '{PROGRAM}' {inner}"
    shell = ["bash"] if launcher is None else [str(launcher)]
    done = subprocess.run(
        # The second command keeps the shell from becoming the first.
        [*shell, "-c", f"{command}; true"],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": term},
        cwd=Path(__file__).parents[3],
        timeout=30,
        check=True,
    )
    return done.stderr.decode()


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    """A shell that goes by the name of a launcher."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("this system has no /proc")
    path = tmp_path / "mpiexec"
    path.symlink_to("/bin/bash")
    return path


def test_its_own_terminal(screen: int) -> None:
    assert found(screen) == "100 x 30"


def test_a_dumb_terminal_is_none(screen: int) -> None:
    assert found(screen, term="dumb") == "none"


def test_a_stream_without_a_file_has_none() -> None:
    assert find_terminal(io.StringIO()) is None


def test_pipe_below_a_launcher_on_a_terminal(screen: int, launcher: Path) -> None:
    assert found(screen, launcher, inner="| cat") == "100 x 30"


def test_file_below_a_launcher_on_a_terminal(screen: int, launcher: Path, tmp_path: Path) -> None:
    assert found(screen, launcher, inner=f"> {tmp_path / 'log'}") == "none"


def test_terminal_below_a_launcher_that_writes_to_a_file(
    screen: int, launcher: Path, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as log:
        assert found(log.fileno(), launcher, inner=f"> {os.ttyname(screen)}") == "none"


def test_no_terminal_anywhere(launcher: Path) -> None:
    assert found(subprocess.DEVNULL, launcher, inner="| cat") == "none"
