from __future__ import annotations

import pytest

from mpihpo.records import RungPlan
from mpihpo.schedule import planned_ladder, promotions, rung_stops


@pytest.mark.parametrize(
    ("least", "most", "factor", "stops"),
    [
        (1, 8, 2, (1, 2, 4, 8)),
        (1, 9, 3, (1, 3, 9)),
        (1, 10, 2, (1, 2, 4, 8, 10)),
        (2, 5, 4, (2, 5)),
        (3, 3, 2, (3,)),
        (1, 1, 2, (1,)),
    ],
)
def test_stops(least: int, most: int, factor: int, stops: tuple[int, ...]) -> None:
    assert rung_stops(least, most, factor) == stops


@pytest.mark.parametrize(
    ("trials", "factor", "kept"), [(16, 2, 8), (9, 3, 3), (10, 3, 3), (5, 2, 2), (1, 2, 1)]
)
def test_promotions(trials: int, factor: int, kept: int) -> None:
    assert promotions(trials, factor) == kept


def test_planned_ladder_of_nine_trials() -> None:
    assert planned_ladder((1, 3, 9), 9, 3) == (
        RungPlan(rung=0, start=0, stop=1, trials=9),
        RungPlan(rung=1, start=1, stop=3, trials=3),
        RungPlan(rung=2, start=3, stop=9, trials=1),
    )


def test_planned_ladder_keeps_one_trial() -> None:
    assert [plan.trials for plan in planned_ladder((1, 2, 4, 8), 3, 2)] == [3, 1, 1, 1]
