"""How many ranks each evaluation gets: ``fixed`` and ``doubling``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mpihpo.records import Evaluation

if TYPE_CHECKING:
    from mpihpo.allocation.settings import AllocationSettings


class AllocationPolicy(Protocol):
    """Decides how many ranks an evaluation gets; which ones is the pool's business."""

    def __init__(
        self, *, settings: AllocationSettings, reduction_factor: int, world_size: int
    ) -> None:
        """``world_size`` counts the ranks that train."""

    def width(self, evaluation: Evaluation) -> int:
        """Ranks that the evaluation needs to start: at least 1, at most ``world_size``."""

    def share(self, evaluations: Sequence[Evaluation], free: int) -> list[int]:
        """Final widths of the evaluations that start now, the most important one first.

        None is below its ``width``, and the sum is at most ``free``. What is not given away stays
        idle until the next outcome, since no further evaluation fits.
        """


class Fixed:
    """Every evaluation gets ``ranks`` ranks, on every rung."""

    def __init__(
        self, *, settings: AllocationSettings, reduction_factor: int, world_size: int
    ) -> None:
        """``reduction_factor`` is not used."""
        limit = world_size if settings.max_ranks is None else settings.max_ranks
        self._width = min(settings.ranks, limit, world_size)

    def width(self, evaluation: Evaluation) -> int:
        """The same for all."""
        return self._width

    def share(self, evaluations: Sequence[Evaluation], free: int) -> list[int]:
        """Give nothing beyond the width away."""
        return [self._width] * len(evaluations)


class Doubling:
    """Ranks grow as trials are promoted: ``ranks * reduction_factor**rung``, up to ``max_ranks``.

    As many ranks as a rung's losing trials leave go to the promoted ones. Ranks that are left
    over, because the widths do not divide the world or few trials are left, go to the trials that
    start, evenly, the remainder to the best.
    """

    def __init__(
        self, *, settings: AllocationSettings, reduction_factor: int, world_size: int
    ) -> None:
        """See ``AllocationPolicy``."""
        limit = world_size if settings.max_ranks is None else settings.max_ranks
        self._limit = min(limit, world_size)
        self._ranks = settings.ranks
        self._reduction_factor = reduction_factor

    def width(self, evaluation: Evaluation) -> int:
        """Ranks of the evaluation's rung."""
        growth: int = self._reduction_factor**evaluation.rung
        return min(self._ranks * growth, self._limit)

    def share(self, evaluations: Sequence[Evaluation], free: int) -> list[int]:
        """Give every rank away while ``max_ranks`` allows."""
        widths = [self.width(evaluation) for evaluation in evaluations]
        left = free - sum(widths)
        growing = [i for i, width in enumerate(widths) if width < self._limit]
        while left > 0 and growing:
            each = left // len(growing)
            for i in growing if each else growing[:left]:
                gain = min(max(each, 1), self._limit - widths[i])
                widths[i] += gain
                left -= gain
            growing = [i for i in growing if widths[i] < self._limit]
        return widths
