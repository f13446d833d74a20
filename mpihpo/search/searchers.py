"""What proposes the next configuration: at random, or point by point of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from mpihpo.errors import ExperimentError, SpaceError
from mpihpo.records import Outcome, Scalar
from mpihpo.search.space import Space

_Live = tuple[tuple[str, Scalar], ...]
# Stands for every value that no condition mentions: it is equal to none of them.
_OTHER: Scalar = math.nan


@runtime_checkable
class Searcher(Protocol):
    """Proposes configurations; lives on the coordinator only.

    Built as ``cls(space=Space, seed=int, mode="min" | "max", trials=int | None)``. The constructor
    is cheap and refuses what it cannot search with an ExperimentError. An attribute ``trials``,
    where there is one, is how many configurations it will propose in all.
    """

    def ask(self, trial_id: int) -> Mapping[str, Scalar] | None:
        """The configuration of trial ``trial_id``, or None when there is none left."""
        ...

    def tell(self, outcome: Outcome) -> None:
        """Take note of what came out of one evaluation."""
        ...


class RandomSearcher:
    """Draws every configuration from the space's distributions."""

    def __init__(self, *, space: Space, seed: int, mode: str, trials: int | None) -> None:
        """Refuse, with an ExperimentError, an unknown number of trials."""
        if trials is None:
            raise ExperimentError("search.trials", "missing; expected how many to draw at random")
        self.trials = trials
        self._space = space
        self._seed = seed

    def ask(self, trial_id: int) -> Mapping[str, Scalar] | None:
        """The configuration of trial ``trial_id``; depends on it and on the seed only."""
        return self._space.sample(self._seed, trial_id) if trial_id < self.trials else None

    def tell(self, outcome: Outcome) -> None:
        """Learns nothing."""


class GridSearcher:
    """Goes through the product of all dimensions' values, the last dimension fastest.

    Only dimensions that exist multiply, so no configuration comes twice. Point ``trial_id`` and the
    grid's size are computed by counting completions, never by going through the points.
    """

    def __init__(self, *, space: Space, seed: int, mode: str, trials: int | None) -> None:
        """Refuse, with a SpaceError, a continuous dimension without ``steps``."""
        self._space = space
        self._values: dict[str, Sequence[Scalar]] = {}
        for name in space.order:
            values = space[name].grid()
            if values is None:
                key = f"search.space.{name}.steps"
                raise SpaceError(key, "missing; expected how many points the grid takes")
            self._values[name] = values
        self._mentioned: dict[str, dict[int, Scalar]] = {}
        """Of names in conditions: the mentioned values by their position, ascending."""
        for other, wanted in (pair for domain in space.values() for pair in domain.when):
            values = self._values[other]
            found = {values.index(value): value for value in wanted if value in values}
            known = self._mentioned.get(other, {})
            self._mentioned[other] = dict(sorted((known | found).items()))
        self._needed = [
            {other for name in space.order[depth:] for other, _ in space[name].when}
            for depth in range(len(space) + 1)
        ]
        self._counts: dict[tuple[int, _Live], int] = {}
        self.size = self._count(0, ())
        """Number of points of the whole grid."""
        self.trials = self.size if trials is None else min(trials, self.size)

    def ask(self, trial_id: int) -> Mapping[str, Scalar] | None:
        """Point ``trial_id`` of the grid."""
        if trial_id >= self.trials:
            return None
        config: dict[str, Scalar] = {}
        live: _Live = ()
        rest = trial_id
        for depth, name in enumerate(self._space.order):
            for values, after in self._branches(depth, live):
                each = self._count(depth + 1, after)
                points = each * max(len(values), 1)
                if rest < points:
                    if values:
                        config[name] = values[rest // each]
                    rest, live = rest % each, after
                    break
                rest -= points
        return self._space.arrange(config)

    def tell(self, outcome: Outcome) -> None:
        """Learns nothing."""

    def _count(self, depth: int, live: _Live) -> int:
        """Number of ways to go on from dimension ``depth``, given what conditions still ask for."""
        if depth == len(self._space):
            return 1
        if (depth, live) not in self._counts:
            self._counts[depth, live] = sum(
                max(len(values), 1) * self._count(depth + 1, after)
                for values, after in self._branches(depth, live)
            )
        return self._counts[depth, live]

    def _branches(self, depth: int, live: _Live) -> Iterator[tuple[Sequence[Scalar], _Live]]:
        """Its values in runs that conditions cannot tell apart; one without values if absent."""
        name = self._space.order[depth]
        kept = tuple(pair for pair in live if pair[0] in self._needed[depth + 1])
        if not self._space.is_active(name, dict(live)):
            yield (), kept
            return
        values = self._values[name]
        if name not in self._needed[depth + 1]:
            yield values, kept
            return
        start = 0
        for position, value in self._mentioned[name].items():
            if start < position:
                yield values[start:position], (*kept, (name, _OTHER))
            yield values[position : position + 1], (*kept, (name, value))
            start = position + 1
        if start < len(values):
            yield values[start:], (*kept, (name, _OTHER))
