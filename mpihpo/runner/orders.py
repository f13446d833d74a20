"""What the coordinator's rank and the other ranks say to each other, apart from state and keys."""

from __future__ import annotations

from dataclasses import dataclass

from mpihpo.records import Allocation, Failure, Outcome, Report, Spent

# Orders: from the dispatcher to a rank's worker.


@dataclass(frozen=True, slots=True)
class Train:
    """Be a member of this allocation."""

    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget what is kept of a trial: all, what is older than ``before``, or that of ``epoch``."""

    trial_id: int
    before: int | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Write the kept state of this finished evaluation as the best one."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Leave:
    """The experiment is over."""

    reason: str
    fault: str | None = None
    """Traceback of a fault of the runtime itself."""


# Events: from a rank to the dispatcher.


@dataclass(frozen=True, slots=True)
class Progressed:
    """The leader's report of an epoch; the outcome carries all of them again."""

    trial_id: int
    report: Report


@dataclass(frozen=True, slots=True)
class Ended:
    """An evaluation is over and all its ranks are free."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Written:
    """The best checkpoint is on disk, or why not."""

    path: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Signalled:
    """A rank was asked to stop."""

    rank: int
    signal: str


@dataclass(frozen=True, slots=True)
class Faulted:
    """A fault of the runtime on a rank: the job ends, and every rank raises it."""

    rank: int
    traceback: str


# Alerts: to a rank's agent, which reads them while the rank trains.


@dataclass(frozen=True, slots=True)
class Abort:
    """A member of the group failed: leave the training function."""

    serial: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class StopSoon:
    """Leave every training function at the end of its epoch."""


@dataclass(frozen=True, slots=True)
class SendState:
    """Send the kept state of a trial to a rank whose group needs it."""

    trial_id: int
    epoch: int


# Members: from each member of a group to its leader.


@dataclass(frozen=True, slots=True)
class MemberEnd:
    """How an evaluation went on one rank; afterwards the rank waits for its next order."""

    serial: int
    spent: Spent
    failure: Failure | None
    is_interrupted: bool
    time: float
    """When it failed, by this rank's clock."""
    is_consequence: bool
    """It failed because another member had."""


@dataclass(frozen=True, slots=True)
class EpochVerdict:
    """The leader's word at an epoch's boundary."""

    serial: int
    epoch: int
    is_last: bool
