"""The section ``schedule`` of the experiment, and the schedulers that it can name."""

from __future__ import annotations

from dataclasses import dataclass

from mpihpo.errors import ExperimentError
from mpihpo.records import Objective
from mpihpo.schedule.protocol import Propose, Scheduler
from mpihpo.schedule.successive_halving import NoHalving, SuccessiveHalving
from mpihpo.settings import check_integer, load_class

SCHEDULERS: dict[str, type[Scheduler]] = {
    "none": NoHalving,
    "successive_halving": SuccessiveHalving,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """How far the trials train. Epochs count completed passes over the training data.

    Raises:
        ExperimentError: A value is impossible; names its dotted key.
    """

    scheduler: str = "successive_halving"
    """A name of ``SCHEDULERS``, or ``package.module:Name``."""
    reduction_factor: int = 2
    """One in so many trials goes on to the next rung."""
    min_epochs: int = 1
    """Completed epochs at the first rung."""
    max_epochs: int
    """Completed epochs of a fully trained trial."""

    def __post_init__(self) -> None:
        """Check each value."""
        load_class(self.scheduler, SCHEDULERS, "schedule.scheduler")
        check_integer(self.reduction_factor, "schedule.reduction_factor", least=2)
        check_integer(self.min_epochs, "schedule.min_epochs", least=1)
        check_integer(self.max_epochs, "schedule.max_epochs", least=1)
        if self.min_epochs > self.max_epochs:
            raise ExperimentError(
                "schedule.min_epochs",
                f"{self.min_epochs} is more than schedule.max_epochs, which is {self.max_epochs}",
            )


def scheduler_class(settings: ScheduleSettings) -> type[Scheduler]:
    """The class that the settings name; its ``ladder`` is the plan."""
    return load_class(settings.scheduler, SCHEDULERS, "schedule.scheduler")


def build_scheduler(
    settings: ScheduleSettings, *, objective: Objective, trials: int | None, propose: Propose
) -> Scheduler:
    """A fresh scheduler that draws its trials by calling ``propose``."""
    cls = scheduler_class(settings)
    return cls(settings=settings, objective=objective, trials=trials, propose=propose)
