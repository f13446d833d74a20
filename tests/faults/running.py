"""Plays the rows of the table under one MPI, checks them and measures how long each took."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tests.faults.comparing import MARKS, check_same
from tests.faults.rows import (
    ANY,
    ENDED,
    FAILED,
    REUSED,
    WHOLE,
    JobFault,
    Measured,
    Play,
    Row,
    TrialFault,
    TrialJob,
)
from tests.faults.table import TRIAL_FAULTS, TRIAL_JOBS
from tests.faults.train_functions import marks
from tests.launch import MPIS, Job, Mpi, Result, start_ranks
from tests.system.experiments import Finished, write_experiment

FUNCTIONS = Path(__file__).parent / "train_functions"

UNDER_ULFM = ("--with-ft", "ulfm")
TRIAL_SECTIONS: dict[str, Any] = {"schedule": {"scheduler": "none", "max_epochs": 3}}
JOB_SECTIONS: dict[str, Any] = {
    "search": {"trials": 8, "space": {"x": {"lower": 0, "upper": 99, "integer": True}}},
    "schedule": {"scheduler": "successive_halving", "min_epochs": 1, "max_epochs": 4},
    "seed": 1,
}
INTERRUPTED = JobFault(
    name="interrupted in its second rung",
    group="",
    plays=(Play(status=75),),
    sections={"arguments": {"faults": {"1 2": "SIGTERM on 1"}}},
)
"""The job that rows go on from which damage what it left."""
_LEFT_OVER_SECONDS = 5.0

T = TypeVar("T")
Mark = Mapping[str, Any]


@dataclass(frozen=True)
class TrialRun:
    """A job of `TRIAL_JOBS` that has ended."""

    finished: Finished
    marks: tuple[Mark, ...]

    @cached_property
    def said(self) -> str:
        """All that was printed, and the notes of the journal."""
        return said(self.finished.result, self.finished.folder)


class Player:
    """Plays rows; each shared job once.

    Args:
        folder: Where the jobs' folders are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, ...], object] = {}
        self._number = 0

    def play(self, row: Row, mpi: Mpi) -> Measured:
        """Play and check one row.

        Raises:
            AssertionError: It came out otherwise, or hung.
        """
        if isinstance(row, TrialFault):
            return self._play_trial_fault(row, mpi)
        return self._play_job_fault(row, mpi)

    def _once(self, *key: str, make: Callable[[], T]) -> T:
        """What ``make`` returned or raised the first time."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, Exception):
            raise made
        return made  # type: ignore[return-value]

    def _new_folder(self) -> Path:
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir(parents=True)
        return folder

    # Faults of a trial.

    def _play_trial_fault(self, row: TrialFault, mpi: Mpi) -> Measured:
        run = self._once(mpi.name, row.job, make=lambda: self._run_trial_job(row.job, mpi))
        job, slowest = TRIAL_JOBS[row.job], 0.0
        for position, trial in zip(row.positions, trials_of(row, mpi), strict=True):
            check_endings(run.finished, trial, row, position, job.width)
            seconds = marks.seconds_to_reuse(run.marks, trial, row.aside)
            assert seconds is not None, f"not all ranks of trial {trial} trained another one"
            assert seconds < row.seconds, f"ranks of trial {trial}: reused after {seconds:.1f} s"
            slowest = max(slowest, seconds)
        for text in row.says:
            assert text in run.said, f"nothing says {text!r}\n{run.finished.result.describe()}"
        outcome = ", ".join(row.endings)
        return Measured(
            row=row,
            mpi=mpi.name,
            ranks=f"{job.width} of {job.ranks}",
            status=str(run.finished.result.rc),
            outcome=f"{outcome}: {row.error}" if row.error else outcome,
            seconds=slowest,
            until=REUSED,
        )

    def _run_trial_job(self, name: str, mpi: Mpi) -> TrialRun:
        job = TRIAL_JOBS[name]
        cases = cases_of(name, mpi)
        folder = self._new_folder()
        add_functions(folder)
        path = write_experiment(
            folder,
            None,
            **{**TRIAL_SECTIONS, **job.sections},
            train=with_file(job.train),
            space={"case": range(len(cases))},
            allocation={"policy": "fixed", "ranks": job.width},
            arguments={"cases": cases, "marks": MARKS},
        )
        options = UNDER_ULFM if job.ulfm else ()
        arguments = ["-m", "mpihpo", "run", str(path)]
        with start_ranks(mpi, job.ranks, arguments, cwd=folder, options=options) as ranks:
            result = ranks.wait(job.seconds)
            check_nothing_left(ranks)
        assert result.rc == 0, result.describe()
        finished = Finished(result, folder / "run")
        if job.is_quiet:
            assert finished.printed
        assert finished.results.reason == "completed", result.describe()
        for trial in range(len(cases) - spare_trials(job), len(cases)):
            assert finished.failures[trial] is None, result.describe()
        return TrialRun(finished, tuple(marks.read(folder / MARKS)))

    # Faults of a job.

    def _play_job_fault(self, row: JobFault, mpi: Mpi) -> Measured:
        folder = self._new_folder()
        if row.after_interruption:
            # Which MPI made it makes no difference, and the first one is the faster.
            make = lambda: self._interrupted(mpi)  # noqa: E731
            shutil.copytree(self._once("interrupted", make=make), folder, dirs_exist_ok=True)
        played = [self._play_one(play, row, mpi, folder) for play in row.plays]
        if row.same:
            check_same(folder, self.undisturbed(row), is_whole=not row.forgets)
        seconds, until, _ = played[row.measured]
        return Measured(
            row=row,
            mpi=mpi.name,
            ranks=str(row.ranks),
            status=", ".join(str(result.rc) for *_, result in played),
            outcome=row.outcome,
            seconds=seconds,
            until=until,
        )

    def _interrupted(self, mpi: Mpi) -> Path:
        folder = self._new_folder()
        self._play_one(INTERRUPTED.plays[0], INTERRUPTED, mpi, folder)
        return folder

    def undisturbed(self, row: JobFault) -> Path:
        """The folder of a job as the row's that nothing disturbs."""
        sections = {key: value for key, value in row.sections.items() if key != "arguments"}
        plain = replace(row, sections=sections, after_interruption=False)
        return self._once(
            "alone", row.train, repr(sections), make=lambda: self._play_undisturbed(plain)
        )

    def _play_undisturbed(self, row: JobFault) -> Path:
        folder = self._new_folder()
        at_once = Play(sections={"arguments": {"seconds": 0.0}})
        self._play_one(at_once, replace(row, program=None), MPIS[0], folder)
        return folder

    def _play_one(
        self, play: Play, row: JobFault, mpi: Mpi, folder: Path
    ) -> tuple[float, str, Result]:
        """Start the program once; returns the seconds to its end, and what they count from."""
        if play.before is not None:
            play.before(folder)
        before = len(marks.read(folder / MARKS))
        arguments = self._arguments(play, row, folder)
        ranks, began = play.ranks or row.ranks, time.time()
        with start_ranks(mpi, ranks, arguments, env=play.env(folder), cwd=folder) as job:
            if play.act is not None:
                wait_for_fault(job, folder, before)
                began = time.time()
                play.act(job, folder)
            result = job.wait(play.within + 20)
            ended = time.time()
            check_nothing_left(job)
        noted = marks.read(folder / MARKS)[before:]
        faults = [mark["time"] for mark in noted if mark["what"] == "fault"]
        seconds = ended - (faults[0] if faults else began)
        until = ENDED if faults else WHOLE
        check_play(play, result, folder, seconds)
        if result.rc == 75:
            check_left_together(noted, result)
        return seconds, until, result

    def _arguments(self, play: Play, row: JobFault, folder: Path) -> list[str]:
        earlier = INTERRUPTED.sections if row.after_interruption else {}
        path = write_job(folder, {**earlier, **row.sections, **play.sections}, row.train)
        if row.program is not None:
            return [*row.program, str(path)]
        return ["-m", "mpihpo", "run", str(path), *play.options]


def add_functions(folder: Path) -> None:
    """Put the training functions beside an experiment, but those that a row has changed there."""
    for file in FUNCTIONS.glob("*.py"):
        if not (folder / file.name).exists():
            shutil.copy(file, folder)


def write_job(folder: Path, sections: Mapping[str, Any], train: str = "whole_jobs:train") -> Path:
    """The experiment of a `JobFault`, with the sections where they differ, beside its functions."""
    add_functions(folder)
    changed = {**JOB_SECTIONS, **sections}
    arguments = {"seconds": 0.05, "faults": {}, "marks": MARKS, **changed.pop("arguments", {})}
    content = {"output": "run", "arguments": arguments, **changed}
    return write_experiment(folder, None, train=with_file(train), **content)


def with_file(train: str) -> str:
    """As an experiment names it."""
    file, _, function = train.partition(":")
    return f"{file}.py:{function}"


def rows_of(name: str, mpi: Mpi) -> list[TrialFault]:
    return [row for row in TRIAL_FAULTS if row.job == name and mpi.name in row.mpis]


def spare_trials(job: TrialJob) -> int:
    """Trials without a fault at the end, which show that every rank is of use again."""
    return job.spares or 2 * max(1, job.ranks // job.width)


def cases_of(name: str, mpi: Mpi) -> list[dict[str, Any]]:
    """What each trial of a job does."""
    faulty = [
        {**row.case, "position": position, "aside": row.aside}
        for row in rows_of(name, mpi)
        for position in row.positions
    ]
    return faulty + [{} for _ in range(spare_trials(TRIAL_JOBS[name]))]


def trials_of(row: TrialFault, mpi: Mpi) -> range:
    first = 0
    for other in rows_of(row.job, mpi):
        if other is row:
            break
        first += len(other.positions)
    return range(first, first + len(row.positions))


def check_endings(
    finished: Finished, trial: int, row: TrialFault, position: int, width: int
) -> None:
    outcomes = [outcome for outcome in finished.outcomes if outcome["trial"] == trial]
    where = f"trial {trial}\n{finished.result.describe()}"
    assert tuple(outcome["ending"] for outcome in outcomes) == row.endings, where
    for outcome in outcomes:
        failure = outcome["failure"]
        if outcome["ending"] != FAILED:
            assert failure is None, where
            continue
        told = f"{failure['kind']}: {failure['message']}"
        assert row.error in ("", failure["kind"]), f"{told}, {where}"
        for text in row.message:
            text = text.replace("{position}", str(position))
            assert text in failure["message"], f"{told}, {where}"
        if row.line:
            # The first failure counts, with the place at which it happened.
            assert failure["rank"] == outcome["ranks"][position], f"{told}, {where}"
            assert row.line in failure["traceback"], failure["traceback"]
    widths = [len(outcome["ranks"]) for outcome in outcomes]
    assert widths[0] == width, where
    assert (widths[-1] > width) == row.widens, where


def check_play(play: Play, result: Result, folder: Path, seconds: float) -> None:
    where = result.describe()
    if play.status == "not 0":
        assert result.rc != 0, where
    else:
        assert play.status in (ANY, result.rc), where
    assert seconds < play.within, f"{seconds:.1f} s from the fault to the end, {where}"
    for text in play.says:
        expected = text.replace("{folder}", str(folder))
        assert expected in said(result, folder / "run"), f"nothing says {expected!r}, {where}"
    if play.lines is not None:
        assert len(result.stderr.splitlines()) == play.lines, where
    if play.check is not None:
        play.check(Finished(result, folder / "run"))


def check_left_together(noted: Sequence[Mark], result: Result) -> None:
    """A stopped job: all ranks of each trial left after the same epoch."""
    left: dict[tuple[int, int], set[int]] = {}
    for mark in noted:
        if mark["what"] == "left":
            left.setdefault((mark["trial"], mark["rung"]), set()).add(mark["epochs"])
    for trial, epochs in left.items():
        assert len(epochs) == 1, f"{trial}: {epochs}, {result.describe()}"


def check_nothing_left(job: Job) -> None:
    end = time.monotonic() + _LEFT_OVER_SECONDS
    while (left := job.processes()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"processes left over: {left}"


def wait_for_fault(job: Job, folder: Path, after: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not any(mark["what"] == "fault" for mark in marks.read(folder / MARKS)[after:]):
        assert time.monotonic() < end, "no fault"
        assert job.mpiexec.poll() is None, "the job ended before the fault"
        time.sleep(0.005)


def said(result: Result, folder: Path) -> str:
    """All that a job printed, and its journal."""
    journal = folder / "journal.jsonl"
    text = journal.read_text(errors="replace") if journal.is_file() else ""
    return result.stdout + result.stderr + text
