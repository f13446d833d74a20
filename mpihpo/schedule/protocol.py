"""What the coordinator expects of a scheduler, built in or a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mpihpo.records import (
    Evaluation,
    Objective,
    Outcome,
    RungPlan,
    RungResult,
    Status,
    TrialRecord,
)

if TYPE_CHECKING:
    from mpihpo.schedule.settings import ScheduleSettings

Propose = Callable[[], "TrialRecord | None"]
"""Draws the next new trial, or None for good when there are no more."""


class Scheduler(Protocol):
    """Decides which trial trains next, and how far.

    A scheduler is a pure state machine: equal outcomes in equal order give equal decisions.
    """

    def __init__(
        self,
        *,
        settings: ScheduleSettings,
        objective: Objective,
        trials: int | None,
        propose: Propose,
    ) -> None:
        """Draw at most ``trials`` new trials, each when it is needed; None: until they end."""

    @classmethod
    def ladder(cls, settings: ScheduleSettings, trials: int) -> tuple[RungPlan, ...]:
        """The rungs as planned, for ``trials`` trials of which none fails."""

    def ask(self) -> Evaluation | None:
        """The most important evaluation that may start now, handed out for good.

        None: nothing may start before the next outcome.
        """

    def tell(self, outcome: Outcome) -> None:
        """Take the outcome of an evaluation that was handed out."""

    @property
    def done(self) -> bool:
        """No evaluation is out and none will follow."""

    def results(self) -> tuple[RungResult, ...]:
        """The rungs closed so far, in the order of their closing."""

    def status(self, trial_id: int) -> Status:
        """What became of a trial; one that was handed out counts as running."""
