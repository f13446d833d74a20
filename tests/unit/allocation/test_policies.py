from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpihpo.allocation import AllocationPolicy, AllocationSettings, build_policy
from mpihpo.errors import ExperimentError
from tests.unit.virtual_clock import evaluation


def policy(world: int, factor: int = 2, **settings: object) -> AllocationPolicy:
    built = AllocationSettings(**settings)  # type: ignore[arg-type]
    return build_policy(built, reduction_factor=factor, world_size=world)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": 0}, "allocation.ranks: 0 is not possible"),
        ({"ranks": "auto"}, "allocation.ranks: 'auto' is not possible"),
        ({"ranks": 4, "max_ranks": 2}, "allocation.max_ranks: 2 is less than allocation.ranks"),
        ({"max_ranks": 0}, "allocation.max_ranks: 0 is not possible"),
        ({"policy": "balanced"}, "allocation.policy: there is no 'balanced'"),
    ],
)
def test_impossible_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        AllocationSettings(**values)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_unknown_policy_lists_those_that_exist() -> None:
    with pytest.raises(ExperimentError, match="fixed, doubling"):
        AllocationSettings(policy="balanced")


def test_more_ranks_than_the_job_has() -> None:
    with pytest.raises(ExperimentError, match=r"allocation\.ranks: 5 ranks .* at most 4"):
        policy(4, ranks=5)


def test_doubling_grows_to_its_limits() -> None:
    widths = [policy(64).width(evaluation(0, rung)) for rung in range(8)]
    assert widths == [1, 2, 4, 8, 16, 32, 64, 64]
    widths = [policy(64, 3, ranks=2, max_ranks=20).width(evaluation(0, k)) for k in range(4)]
    assert widths == [2, 6, 18, 20]


@pytest.mark.parametrize(
    ("count", "free", "settings", "widths"),
    [
        (2, 5, {}, [3, 2]),
        (3, 8, {}, [3, 3, 2]),
        (3, 3, {}, [1, 1, 1]),
        (1, 7, {}, [7]),
        (3, 8, {"max_ranks": 2}, [2, 2, 2]),
        (3, 5, {"max_ranks": 2}, [2, 2, 1]),
        (2, 9, {"policy": "fixed", "ranks": 2}, [2, 2]),
    ],
)
def test_leftover(count: int, free: int, settings: dict[str, object], widths: list[int]) -> None:
    work = [evaluation(i) for i in range(count)]
    assert policy(16, **settings).share(work, free) == widths


def test_leftover_of_mixed_rungs_fills_up_to_the_limit() -> None:
    work = [evaluation(0, rung=2), evaluation(1, rung=1), evaluation(2), evaluation(3)]
    assert policy(32, max_ranks=5).share(work, 17) == [5, 5, 4, 3]


@given(
    rungs=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    extra=st.integers(0, 40),
    max_ranks=st.one_of(st.none(), st.integers(1, 12)),
)
def test_doubling_gives_all_away(rungs: list[int], extra: int, max_ranks: int | None) -> None:
    world = 100
    doubling = policy(world, max_ranks=max_ranks)
    work = [evaluation(i, rung=rung) for i, rung in enumerate(rungs)]
    least = [doubling.width(entry) for entry in work]
    free = min(world, sum(least) + extra)
    widths = doubling.share(work, free)
    limit = max_ranks or world
    assert all(low <= width <= limit for low, width in zip(least, widths, strict=True))
    assert sum(widths) == min(free, limit * len(work))
