"""Batch sizes and learning-rate factor of a trial, by the experiment's policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpihpo.experiment import BatchSettings


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a step takes on a group of a given size."""

    global_size: int
    """Samples per step over the whole group."""
    per_rank_size: int
    """Samples per step on a rank; of uneven shares the largest."""
    lr_scale: float
    """Factor for the learning rate that the configuration names."""


def plan_batch(settings: BatchSettings, *, first_width: int, world_size: int) -> BatchPlan:
    """Sizes for a group of ``world_size`` ranks; ``first_width`` is a trial's width on rung 0.

    ``keep_global`` shares the batch among more ranks. ``keep_per_rank`` keeps each rank's share and
    the batch grows; the learning rate then follows by the linear rule (Goyal et al. 2017,
    arXiv:1706.02677) or the square-root rule (Malladi et al. 2022, arXiv:2205.10287).
    """
    if settings.on_resize == "keep_global":
        return BatchPlan(settings.size, math.ceil(settings.size / world_size), 1.0)
    per_rank = math.ceil(settings.size / first_width)
    growth = per_rank * world_size / settings.size
    scale = {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[settings.lr_scaling]
    return BatchPlan(per_rank * world_size, per_rank, scale)
