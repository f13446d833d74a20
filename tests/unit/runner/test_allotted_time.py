"""What batch systems say about a job's end, by their answers as text."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from mpihpo.runner import allotted_time
from mpihpo.runner.allotted_time import seconds_left

QSTAT = """Job Id: 123.server
    Job_Name = mpihpo
    resources_used.cput = 00:10:00
    resources_used.walltime = {used}
    job_state = R
    Resource_List.nodect = 4
    Resource_List.walltime = {limit}
    Resource_List.place = free
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, ...]], list[str]]:
    commands: list[tuple[str, ...]] = []
    answers: list[str] = []

    def ask(*command: str) -> str:
        commands.append(command)
        return answers[0]

    monkeypatch.setattr(allotted_time, "_ask", ask)
    return commands, answers


def test_no_batch_system_means_no_limit():
    assert seconds_left({}) is None


def test_slurm_says_it_in_the_environment():
    end = str(int(time.time()) + 3600)
    left = seconds_left({"SLURM_JOB_END_TIME": end, "SLURM_JOB_ID": "5"})
    assert left == pytest.approx(3600, abs=2)
    past = seconds_left({"SLURM_JOB_END_TIME": "1000"})
    assert past is not None
    assert past < 0


@pytest.mark.parametrize("end", ["", "soon", "nan", "inf", "0", "-1"])
def test_what_is_no_time_is_no_limit(end: str):
    assert seconds_left({"SLURM_JOB_END_TIME": end}) is None


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        ("1-02:03:04            \n", 93784.0),
        ("10:00:00\n", 36000.0),
        ("59:01", 3541.0),
        ("0:00\n", 0.0),
        ("UNLIMITED\n", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
        ("slurm_load_jobs error: Invalid job id specified", None),
    ],
)
def test_slurm_answers(
    asked: tuple[list[tuple[str, ...]], list[str]], answer: str, seconds: float | None
):
    commands, answers = asked
    answers.append(answer)
    assert seconds_left({"SLURM_JOB_ID": "77"}) == seconds
    assert commands == [("squeue", "-h", "-j", "77", "-O", "TimeLeft")]


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (QSTAT.format(used="00:10:30", limit="02:00:00"), 6570.0),
        (QSTAT.format(used="100:00:00", limit="120:00:01"), 72001.0),
        (
            QSTAT.replace("    resources_used.walltime = {used}\n", "").format(limit="01:00:00"),
            3600,
        ),
        ("Job Id: 123.server\n    job_state = R\n", None),
        ("", None),
    ],
)
def test_pbs_answers(
    asked: tuple[list[tuple[str, ...]], list[str]], answer: str, seconds: float | None
):
    commands, answers = asked
    answers.append(answer)
    assert seconds_left({"PBS_JOBID": "123.server"}) == seconds
    assert commands == [("qstat", "-f", "123.server")]


def test_asking_a_program_that_is_not_there_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seconds_left({"SLURM_JOB_ID": "77"}) is None
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\necho 1:00\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert seconds_left({"SLURM_JOB_ID": "77"}) is None
    program.write_text('#!/bin/sh\n[ "$*" = "-h -j 77 -O TimeLeft" ] && echo 1:00\n')
    assert seconds_left({"SLURM_JOB_ID": "77"}) == 60.0


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "qstat"
    program.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(allotted_time, "_ASK_SECONDS", 0.2)
    began = time.monotonic()
    assert seconds_left({"PBS_JOBID": "1"}) is None
    assert time.monotonic() - began < 5
