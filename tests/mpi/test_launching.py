"""The launcher itself: a hang and a failed assertion must be seen, and leave nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.launch import Mpi, run_programs, start_ranks


def test_a_hang_fails_and_tells_where_each_rank_stood(mpi: Mpi) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)hang: no end after 4 s") as failure:
        run_programs(mpi, 3, "launching", "hang_on_the_last_rank", timeout=4)
    text = str(failure.value)
    assert time.monotonic() - began < 12
    for rank in range(3):
        assert f"rank {rank} is here" in text
        assert f"--- rank {rank} stderr ---\n" in text
    assert "in stuck_for_ever" in text.partition("--- rank 2 stderr ---")[2]
    assert text.count("in hang_on_the_last_rank") == 3


def test_an_assertion_on_one_rank_ends_the_job_with_its_traceback(mpi: Mpi) -> None:
    with pytest.raises(AssertionError, match="AssertionError: the reason") as failure:
        run_programs(mpi, 3, "launching", "fail_on_the_last_rank", timeout=30)
    assert "fail_on_the_last_rank" in str(failure.value).partition("--- rank 2 stderr ---")[2]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_process_is_left_behind(mpi: Mpi) -> None:
    arguments = [
        "-m",
        "tests.rank_program",
        "tests.mpi.programs.launching",
        "hang_on_the_last_rank",
    ]
    with start_ranks(mpi, 2, arguments, env={"MPIHPO_LEFT_BEHIND": mpi.name}) as job:
        for rank in range(2):
            job.pid(rank)
        assert marked(mpi.name)
    end = time.monotonic() + 5
    while marked(mpi.name) and time.monotonic() < end:
        time.sleep(0.05)
    assert marked(mpi.name) == []


def marked(name: str) -> list[str]:
    """Command lines of the processes with our variable."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"MPIHPO_LEFT_BEHIND={name}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found
