"""What the coordinator's rank and the other ranks say to each other, apart from state and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpihpo.records import Allocation, Ending, Failure, Outcome, Report, Spent

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
    unwritten: str | None = None
    """What could not be written to disk."""
    lost: tuple[int, ...] = ()
    """World ranks that are set aside or dead: the others end without them."""


# Events: from a rank to the dispatcher.


@dataclass(frozen=True, slots=True)
class Progressed:
    """The leader's report of an epoch; the outcome carries all of them again."""

    trial_id: int
    report: Report


@dataclass(frozen=True, slots=True)
class Ended:
    """An evaluation is over and all its ranks are free.

    Plain values, without the allocation that the dispatcher knows by its serial: this is sent for
    each evaluation, and records in records take their time to pickle.
    """

    serial: int
    ending: str
    reports: tuple[tuple[int, Mapping[str, float], float], ...]
    """Fields of each `Report`."""
    objective: float | None
    failure: Failure | None
    t_start: float
    t_stop: float
    spent: tuple[float, float, float, float]
    """Fields of `Spent`."""
    saving: int | None = None
    """The epoch whose state the leader is writing to disk; `Saved` follows."""
    state_bytes: int | None = None
    """Of the state that the leader keeps; 0: there is none; None: nothing is kept."""

    def outcome(self, allocation: Allocation) -> Outcome:
        """The whole record."""
        return Outcome(
            allocation=allocation,
            ending=Ending(self.ending),
            reports=tuple(Report(*fields) for fields in self.reports),
            objective=self.objective,
            failure=self.failure,
            t_start=self.t_start,
            t_stop=self.t_stop,
            spent=Spent(*self.spent),
            state_bytes=self.state_bytes,
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """A trial's state is on the disk, or why not."""

    trial_id: int
    epoch: int
    problem: str | None
    size: int = 0
    """Bytes that it takes there."""


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
class Failing:
    """A member has failed, so that all of them are to leave the evaluation."""

    serial: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Through:
    """A rank has left an evaluation that failed, or had left it before."""

    serial: int


@dataclass(frozen=True, slots=True)
class Stacks:
    """Where a rank stands, as it was asked to tell."""

    serial: int
    text: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank that trains is alive."""

    serial: int
    waits_in: str | None
    """The collective call in which it has been since its last beat, if it has."""


@dataclass(frozen=True, slots=True)
class Died:
    """A rank is dead: told with what follows from it, which may come before the news itself."""

    rank: int


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
class TellStacks:
    """Tell where the rank stands."""

    serial: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Ranks are set aside; the dispatcher has made the outcome of their evaluation itself."""

    serial: int


@dataclass(frozen=True, slots=True)
class Gone:
    """All ranks that are set aside or dead by now: wait for nothing from them."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """The dispatcher's own sign of life, to the rank that watches it."""


@dataclass(frozen=True, slots=True)
class Desert:
    """The coordinator's rank is silent: leave the job without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopSoon:
    """Leave every training function at the end of its epoch."""


@dataclass(frozen=True, slots=True)
class SendState:
    """Send the kept state of a trial to a rank whose group needs it."""

    trial_id: int
    epoch: int
    channel: int


# Members: from each member of a group to its leader.


@dataclass(frozen=True, slots=True)
class MemberEnd:
    """How an evaluation went on one rank; afterwards the rank waits for its next order."""

    rank: int
    """Of the world."""
    serial: int
    spent: Spent
    failure: Failure | None
    is_interrupted: bool
    time: float
    """When it failed, by this rank's clock."""
    is_consequence: bool
    """It failed because another member had."""
    has_entered: bool
    """Its training function used ``trial.epochs()``."""


@dataclass(frozen=True, slots=True)
class EpochVerdict:
    """The leader's word at an epoch's boundary."""

    serial: int
    epoch: int | None
    """Completed epochs; None: it came to its end without ``trial.epochs()``."""
    is_last: bool
