"""The data on the arrows between the parts: plain, frozen and nested.

    search -> TrialRecord -> schedule -> Evaluation -> allocation -> Allocation -> runner -> Outcome

Records nest, so ``outcome.allocation.evaluation.trial.config`` is where an outcome came from. An
evaluation covers the epochs of the half-open range (start, stop]; epochs count from 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

Scalar = bool | int | float | str | None
Config = Mapping[str, Scalar]


def epochs_text(start: int, stop: int) -> str:
    """The epochs of (start, stop] for people: ``3-4``, or ``1`` where there is one only."""
    return f"{start + 1}-{stop}" if stop > start + 1 else str(stop)


class Status(str, Enum):
    """What became of a trial. Only ``PARKED`` trials can still be promoted."""

    PENDING = "pending"
    RUNNING = "running"
    PARKED = "parked"
    STOPPED = "stopped"
    COMPLETED = "completed"
    FAILED = "failed"


class Ending(str, Enum):
    """How one evaluation ended."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One configuration, to be trained over one or more rungs."""

    id: int
    """Number in the order of proposal, from 0."""
    config: Config
    """Names to values; names whose ``when`` does not hold are absent."""
    seed: int
    """For the training function's generators; depends on the experiment's seed and ``id`` only."""

    @property
    def config_hash(self) -> str:
        """Eight hexadecimal digits that are equal on all ranks for equal configurations."""
        text = json.dumps(dict(self.config), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One trial on one rung: train from epoch ``start`` to epoch ``stop``."""

    trial: TrialRecord
    rung: int
    start: int
    """Completed epochs before."""
    stop: int
    """Completed epochs after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The world ranks lent to one evaluation."""

    serial: int
    """Unique over the job and growing: names the group, its store keys and its messages."""
    evaluation: Evaluation
    ranks: tuple[int, ...]
    """World ranks in the order of the group's ranks; the first is the leader."""
    holders: tuple[int, ...] = ()
    """World ranks that hold the trial's state of epoch ``start``; empty at the first rung."""
    keepers: tuple[int, ...] = ()
    """Members that keep the state of epoch ``stop``: the leader, and a rank of a second node."""

    @property
    def leader(self) -> int:
        """World rank of the group's rank 0."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class Report:
    """What the leader reported for one epoch."""

    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    """Since the evaluation's training function was entered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an evaluation failed: the first error on any of its ranks."""

    rank: int
    """World rank that failed first."""
    kind: str
    """Name of the error's class."""
    message: str
    """One line."""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one evaluation by part, of the slowest rank of its group."""

    resplit: float = 0.0
    """Building the communicator and the process group, and freeing them."""
    restore: float = 0.0
    """Handing state to the group."""
    train: float = 0.0
    """Inside the training function, restoring and saving left out."""
    save: float = 0.0
    """Keeping the state in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out of one evaluation."""

    allocation: Allocation
    ending: Ending
    reports: tuple[Report, ...] = ()
    objective: float | None = None
    """The objective at epoch ``stop``; None unless the evaluation finished."""
    failure: Failure | None = None
    t_start: float = 0.0
    """Seconds since the job's start at which the ranks were given the evaluation."""
    t_stop: float = 0.0
    """Seconds since the job's start at which the ranks were free again."""
    spent: Spent = field(default_factory=Spent)
    state_bytes: int | None = None
    """Size of the state that each keeper holds; 0: the trial has none; None: not known."""


def reached(outcome: Outcome) -> int:
    """Completed epochs of a trial after an evaluation that did not fail."""
    if outcome.ending is Ending.FINISHED:
        return outcome.allocation.evaluation.stop
    start = outcome.allocation.evaluation.start
    return outcome.reports[-1].epoch if outcome.reports else start


@dataclass(frozen=True, slots=True, kw_only=True)
class RungPlan:
    """One line of a ladder: how many trials train from epoch ``start`` to epoch ``stop``."""

    rung: int
    start: int
    stop: int
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One line of a realised ladder."""

    rung: int
    start: int
    stop: int
    evaluated: int
    failed: int
    promoted: tuple[int, ...]
    """Ids of the trials that go on, best first; of the last rung, none."""
    best: float | None
    """Best objective of the rung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which reported metric decides, and which way."""

    metric: str
    mode: str = "min"
    """``min`` or ``max``."""

    def key(self, value: float | None) -> float:
        """A sort key: smaller is better, and no value is worst."""
        if value is None:
            return float("inf")
        return value if self.mode == "min" else -value


def best_outcome(outcomes: Iterable[Outcome], objective: Objective) -> Outcome | None:
    """The finished outcome of the best trial: most epochs first, then objective, then lowest id.

    More training goes first because a value of a lower rung is not comparable with one of a higher
    rung; within equal training the objective decides.
    """

    def rank(outcome: Outcome) -> tuple[int, float, int]:
        evaluation = outcome.allocation.evaluation
        return (-evaluation.stop, objective.key(outcome.objective), evaluation.trial.id)

    finished = [outcome for outcome in outcomes if outcome.ending is Ending.FINISHED]
    return min(finished, key=rank, default=None)
