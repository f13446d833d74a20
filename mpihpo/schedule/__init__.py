"""HOW FAR: rung arithmetic and the schedulers that decide which trial trains next, and how far."""

from mpihpo.schedule.protocol import Propose, Scheduler
from mpihpo.schedule.rungs import planned_ladder, promotions, rung_stops
from mpihpo.schedule.settings import (
    SCHEDULERS,
    ScheduleSettings,
    build_scheduler,
    scheduler_class,
)
from mpihpo.schedule.successive_halving import NoHalving, SuccessiveHalving

__all__ = [
    "SCHEDULERS",
    "NoHalving",
    "Propose",
    "ScheduleSettings",
    "Scheduler",
    "SuccessiveHalving",
    "build_scheduler",
    "planned_ladder",
    "promotions",
    "rung_stops",
    "scheduler_class",
]
