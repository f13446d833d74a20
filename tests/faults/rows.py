"""What a row of the table says: a fault, and what must become of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launch import Job
from tests.system.experiments import Finished

REUSED = "ranks reused"
"""Measured from the fault until all ranks of the trial had entered their next evaluation."""
ENDED = "job ended"
"""Measured from the fault until no process was left."""
WHOLE = "whole job"
"""Measured from the start of the job: its fault is there before."""

ANY, NOT_0 = "any", "not 0"
"""Exit statuses of a play, beside numbers."""
BOTH = ("mpich", "openmpi")
FIRST = ("mpich",)
"""Where the MPI makes no difference, once is enough."""
SECOND = ("openmpi",)
FAILED, FINISHED, INTERRUPTED = "failed", "finished", "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """A job whose trials each suffer one fault; those of all its rows, then some without."""

    train: str
    """``file:function`` in ``train_functions``."""
    ranks: int
    width: int
    """Ranks of each trial."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Of the experiment, where they differ from `running.TRIAL_SECTIONS`."""
    ulfm: bool = False
    """Whether mpiexec is asked to survive the death of a rank."""
    is_quiet: bool = True
    """Whether no rank but 0 prints, and nobody warns."""
    spares: int = 0
    """Trials without a fault at the end, which show that every rank is of use again; 0: as many as
    take each rank twice."""
    seconds: float = 60.0
    """Until the job counts as hanging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFault:
    """A row: a fault inside a trial, which must be the end of nothing but this trial."""

    name: str
    group: str
    job: str
    """A name of `TRIAL_JOBS`."""
    case: Mapping[str, Any]
    """What the training function is to do."""
    positions: tuple[int, ...] = (0,)
    """Ranks of the group that do it: each in a trial of its own."""
    error: str = ""
    """The error's class; empty: any."""
    message: tuple[str, ...] = ()
    """Parts of its message."""
    line: str = ""
    """Text of the line that the traceback must show, if any."""
    says: tuple[str, ...] = ()
    """Parts of what the job prints and writes to its journal."""
    endings: tuple[str, ...] = (FAILED,)
    """Of the trial's evaluations, one after the other."""
    aside: int = 0
    """How many of the trial's ranks never come back, or die."""
    widens: bool = False
    """Whether the trial is tried again on more ranks."""
    seconds: float = 10.0
    """At most, from the fault until its ranks have entered their next evaluation."""
    mpis: tuple[str, ...] = BOTH


Act = Callable[[Job, Path], None]
"""What is done to a running job, given the folder of its experiment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One start of the program in a `JobFault`."""

    options: tuple[str, ...] = ()
    """Of ``mpihpo run``."""
    ranks: int | None = None
    """None: the row's."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Of the experiment, where they differ from the row's."""
    env: Callable[[Path], Mapping[str, str]] = lambda folder: {}
    """More environment variables, given the experiment's folder."""
    before: Callable[[Path], None] | None = None
    """What is done to the experiment's folder first."""
    act: Act | None = None
    """What is done to the job as soon as a training function notes a fault."""
    status: int | str = 0
    says: tuple[str, ...] = ()
    """Parts of what it prints; ``{folder}`` is the experiment's folder."""
    lines: int | None = None
    """How many lines of standard error it prints; None: any."""
    within: float = 20.0
    """Seconds from the fault to the end of the job, at most."""
    check: Callable[[Finished], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFault:
    """A row: a fault of a whole job, and the jobs after it."""

    name: str
    group: str
    plays: tuple[Play, ...]
    outcome: str = ""
    """What becomes of it, in a few words."""
    train: str = "whole_jobs:train"
    ranks: int = 2
    sections: Mapping[str, Any] = field(default_factory=dict)
    after_interruption: bool = False
    """Whether the first play finds what `running.INTERRUPTED` left."""
    same: bool = False
    """Whether in the end the results must be those of a job that nothing disturbs."""
    forgets: bool = False
    """Whether outcomes are lost, so that their evaluations are done again."""
    program: tuple[str, ...] | None = None
    """Instead of ``-m mpihpo run``: a program, for jobs that are embedded."""
    measured: int = 0
    """The play whose seconds are shown."""
    mpis: tuple[str, ...] = BOTH


Row = TrialFault | JobFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A row that came out as it must under one MPI."""

    row: Row
    mpi: str
    ranks: str
    status: str
    outcome: str
    seconds: float
    until: str
