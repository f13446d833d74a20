"""A run's folder belongs to one living job at a time."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpihpo.errors import ExperimentError, ResultsError
from mpihpo.runner import lock
from mpihpo.runner.lock import STALE_SECONDS, RunLock


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def leave_lock(folder: Path, *, age: float = 0.0, **owner: object) -> Path:
    """As another job left it so many seconds ago."""
    path = folder / lock.NAME
    path.write_text(json.dumps({"host": platform.node(), "pid": 1, "job": None, **owner}))
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_it_is_there_while_it_lasts(tmp_path: Path):
    with RunLock(tmp_path):
        owner = json.loads((tmp_path / lock.NAME).read_text())
        assert owner["pid"] == os.getpid()
        assert owner["host"] == platform.node()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_living_process_is_not_disturbed(tmp_path: Path, other_process: subprocess.Popen[bytes]):
    path = leave_lock(tmp_path, pid=other_process.pid, job="77", age=10 * STALE_SECONDS)
    content = path.read_text()
    with pytest.raises(ExperimentError) as caught, RunLock(tmp_path):
        pytest.fail("was let in")
    assert str(caught.value) == (
        f"output: {tmp_path} is in use by process {other_process.pid} on {platform.node()}, "
        "job 77; expected a folder of its own"
    )
    assert path.read_text() == content


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path):
    leave_lock(tmp_path, pid=dead_pid())
    with RunLock(tmp_path):
        assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_lock_of_a_process_that_nobody_reaps_is_taken_over(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
):
    other_process.kill()
    # Dead, and still there until its parent, which is this process, waits for it.
    os.waitid(os.P_PID, other_process.pid, os.WEXITED | os.WNOWAIT)
    leave_lock(tmp_path, pid=other_process.pid)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(("age", "is_free"), [(0.0, False), (100.0, False), (121.0, True)])
def test_the_lock_of_another_host_goes_by_its_age(tmp_path: Path, age: float, is_free: bool):
    leave_lock(tmp_path, host="elsewhere", pid=dead_pid(), age=age)
    if is_free:
        with RunLock(tmp_path):
            assert json.loads((tmp_path / lock.NAME).read_text())["host"] == platform.node()
        return
    with (
        pytest.raises(ExperimentError, match=r"in use by process \d+ on elsewhere"),
        RunLock(tmp_path),
    ):
        pytest.fail("was let in")


@pytest.mark.parametrize("content", ["", "{", "[]", "17", '{"host": "\xff'])
def test_a_lock_that_cannot_be_read_goes_by_its_age(tmp_path: Path, content: str):
    path = leave_lock(tmp_path)
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ExperimentError, match="in use by another job;"), RunLock(tmp_path):
        pytest.fail("was let in")
    old = time.time() - STALE_SECONDS - 1
    os.utime(path, (old, old))
    with RunLock(tmp_path):
        pass


def test_touching_keeps_it_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.0)
    path = tmp_path / lock.NAME
    with RunLock(tmp_path) as held:
        os.utime(path, (0, 0))
        held.touch()
        assert time.time() - path.stat().st_mtime < 60
        path.unlink()  # the folder is away for a moment
        held.touch()


def test_touching_is_cheap(tmp_path: Path):
    path = tmp_path / lock.NAME
    with RunLock(tmp_path) as held:
        os.utime(path, (0, 0))
        held.touch()
        assert path.stat().st_mtime == 0  # not that soon again


def test_a_job_that_lost_its_folder_is_told_and_leaves_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.0)
    with RunLock(tmp_path) as held:
        path = leave_lock(tmp_path, host="elsewhere", pid=5)
        with pytest.raises(ResultsError, match="was taken over by process 5 on elsewhere"):
            held.touch()
    assert path.exists()


def test_of_two_that_see_a_stale_lock_one_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
):
    """The other one is quicker, between this one's look and its deed."""
    leave_lock(tmp_path, pid=dead_pid())

    def quicker(pid: object) -> bool:
        (tmp_path / lock.NAME).unlink()
        leave_lock(tmp_path, pid=other_process.pid)
        return False

    monkeypatch.setattr(lock, "_is_running", quicker)
    message = f"in use by process {other_process.pid} "
    with pytest.raises(ExperimentError, match=message), RunLock(tmp_path):
        pytest.fail("was let in")
    assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == other_process.pid
    assert len(list(tmp_path.iterdir())) == 1
