from __future__ import annotations

import pytest

from mpihpo.errors import ExperimentError
from mpihpo.schedule import NoHalving, ScheduleSettings, SuccessiveHalving, scheduler_class


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_epochs": 0}, "schedule.max_epochs: 0 is not possible"),
        ({"max_epochs": 2.5}, "schedule.max_epochs: 2.5 is not possible"),
        ({"max_epochs": 8, "min_epochs": 0}, "schedule.min_epochs: 0 is not possible"),
        ({"max_epochs": 4, "min_epochs": 5}, "schedule.min_epochs: 5 is more than"),
        ({"max_epochs": 8, "reduction_factor": 1}, "schedule.reduction_factor: 1 is not possible"),
        ({"max_epochs": 8, "reduction_factor": True}, "schedule.reduction_factor: True is not"),
        ({"max_epochs": 8, "scheduler": "asha"}, "schedule.scheduler: there is no 'asha'"),
        ({"max_epochs": 8, "scheduler": 3}, "schedule.scheduler: there is no 3"),
    ],
)
def test_impossible_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        ScheduleSettings(**values)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_unknown_scheduler_lists_those_that_exist() -> None:
    with pytest.raises(ExperimentError, match="none, successive_halving"):
        ScheduleSettings(scheduler="asha", max_epochs=8)


def test_classes_by_name() -> None:
    own = f"{SuccessiveHalving.__module__}:{SuccessiveHalving.__name__}"
    assert scheduler_class(ScheduleSettings(max_epochs=8)) is SuccessiveHalving
    assert scheduler_class(ScheduleSettings(scheduler="none", max_epochs=8)) is NoHalving
    assert scheduler_class(ScheduleSettings(scheduler=own, max_epochs=8)) is SuccessiveHalving
