"""What a step takes when a trial's group grows; batch.size counts on the first rung's group."""

from __future__ import annotations

import math

import pytest

from mpihpo.experiment import BatchSettings
from mpihpo.runner.batch import BatchPlan, plan_batch


@pytest.mark.parametrize(
    ("first", "world", "plan"),
    [
        (1, 1, BatchPlan(32, 32, 1.0)),
        (1, 4, BatchPlan(32, 8, 1.0)),
        (1, 3, BatchPlan(32, 11, 1.0)),  # 11, 11, 10
        (4, 1, BatchPlan(32, 32, 1.0)),
    ],
)
def test_keep_global_shares_the_batch(first: int, world: int, plan: BatchPlan) -> None:
    assert plan_batch(BatchSettings(size=32), first_width=first, world_size=world) == plan


@pytest.mark.parametrize(
    ("first", "world", "sizes", "growth"),
    [
        (1, 1, (32, 32), 1.0),
        (1, 4, (128, 32), 4.0),
        (2, 2, (32, 16), 1.0),  # the first rung has batch.size in all, whatever its width
        (2, 8, (128, 16), 4.0),
        (4, 1, (8, 8), 0.25),
        (3, 3, (33, 11), 33 / 32),  # a size that its ranks cannot share evenly is rounded up
        (3, 6, (66, 11), 66 / 32),
    ],
)
@pytest.mark.parametrize("lr_scaling", ["none", "linear", "sqrt"])
def test_keep_per_rank_grows_the_batch(
    first: int, world: int, sizes: tuple[int, int], growth: float, lr_scaling: str
) -> None:
    settings = BatchSettings(size=32, on_resize="keep_per_rank", lr_scaling=lr_scaling)
    plan = plan_batch(settings, first_width=first, world_size=world)
    assert (plan.global_size, plan.per_rank_size) == sizes
    scales = {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}
    assert plan.lr_scale == pytest.approx(scales[lr_scaling])
