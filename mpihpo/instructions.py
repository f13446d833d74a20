"""What a coordinator tells whoever drives it to do, and the view of it that a display shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpihpo.records import Allocation, Outcome, RungResult, Status

COMPLETED = "completed"
EVERY_TRIAL_FAILED = "every trial failed"
TIME_LIMIT = "time limit"
TOO_FEW_RANKS = "too few ranks are left"


@dataclass(frozen=True, slots=True)
class Start:
    """The ranks of the allocation form a group and train."""

    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Drop:
    """These world ranks forget what they keep of the trial's state."""

    trial_id: int
    ranks: tuple[int, ...]
    has_ended: bool = False
    """The trial cannot be promoted any more: what is on the disk goes too."""
    from_disk: bool = False
    """What is on the disk goes, though the trial may still be promoted."""


@dataclass(frozen=True, slots=True)
class CloseRung:
    """A rung is over; comes once per rung."""

    result: RungResult


@dataclass(frozen=True, slots=True)
class Save:
    """This world rank writes the best trial's checkpoint."""

    trial_id: int
    rank: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The experiment is over; always the last instruction."""

    reason: str
    """``completed``, ``every trial failed``, or the reason that ``stop`` was given."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the person who watches, and for the journal."""

    text: str


Instruction = Start | Drop | CloseRung | Save | Notice | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a progress display shows."""

    rung: int
    """The highest one that was started."""
    running: tuple[Allocation, ...]
    counts: Mapping[Status, int]
    """Trials by status; a status that no trial has is absent."""
    busy_ranks: int
    ranks: int
    """Training ranks, busy or not."""
    utilisation: float
    """Busy rank-seconds over all rank-seconds, up to the last event."""
    best: Outcome | None
