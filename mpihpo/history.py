"""What an earlier job of the same experiment did, as its journal tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpihpo.records import Allocation, Outcome, TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Enough to decide as if the earlier job had gone on."""

    trials: Mapping[int, TrialRecord]
    """Every trial that was started."""
    steps: Sequence[Allocation | Outcome]
    """Starts (as allocations) and outcomes in the order in which they happened."""
    saved: Mapping[int, Mapping[int, int]]
    """Epochs of each trial from which it can go on, with the bytes that its state takes on the
    disk; 0 if it has none."""
