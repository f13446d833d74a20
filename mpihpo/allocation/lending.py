"""Lends ranks to evaluations, while ranks are lost and come back, and counts the time they work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mpihpo.allocation.placement import RankPool
from mpihpo.allocation.policies import AllocationPolicy
from mpihpo.allocation.topology import Topology
from mpihpo.errors import AllocationError
from mpihpo.records import Evaluation


@dataclass(frozen=True, slots=True)
class Request:
    """An evaluation that is to start."""

    evaluation: Evaluation
    least: int
    """Ranks without which it is known to fail; 1 if nothing is known."""
    holders: tuple[int, ...]
    """Ranks that hold the trial's state."""


class Lender:
    """The policy says how many ranks, the pool which ones.

    Args:
        policy: Called with the number of ranks that train, whenever it changes.
        topology: Of all world ranks.
        ranks: Those that train.
    """

    def __init__(
        self,
        policy: Callable[[int], AllocationPolicy],
        topology: Topology,
        ranks: Collection[int],
    ) -> None:
        self._make_policy = policy
        self._policy, self._made_for = policy(len(ranks)), len(ranks)
        self.pool = RankPool(topology, ranks)
        """To release ranks, to retire and readmit them."""
        self._since = self._busy_seconds = self._seconds = 0.0

    def width(self, request: Request) -> int:
        """Ranks that an evaluation needs to start.

        Raises:
            AllocationError: The policy wants none, or more than there are.
        """
        width, size = self._policy.width(request.evaluation), self.pool.size
        if not 1 <= width <= size:
            name, trial_id = type(self._policy).__name__, request.evaluation.trial.id
            raise AllocationError(f"{name} wants {width} of {size} ranks for trial {trial_id}")
        return max(width, min(request.least, size))

    def lend(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Take ranks for evaluations that fit together, the most important one first.

        Raises:
            AllocationError: The policy shares ranks that are not there.
        """
        free = self.pool.free
        widths = self._share(requests, free)
        if len(widths) != len(requests) or min(widths) < 1 or sum(widths) > free:
            name = type(self._policy).__name__
            count = len(requests)
            raise AllocationError(f"{name} shares {free} free ranks among {count} as {widths}")
        holders = [request.holders for request in requests]
        return self.pool.take_all(list(zip(widths, holders, strict=True)))

    def _share(self, requests: Sequence[Request], free: int) -> list[int]:
        """Final widths: what the policy says, but not below what a trial needs."""
        least = {i: self.width(each) for i, each in enumerate(requests) if each.least > 1}
        others = [each.evaluation for i, each in enumerate(requests) if i not in least]
        rest = iter(self._policy.share(others, free - sum(least.values())) if others else ())
        widths = [least[i] if i in least else next(rest, 0) for i in range(len(requests))]
        return [*widths, *rest]

    def renew_policy(self) -> None:
        """Ask for a policy for the ranks that there are now, if their number has changed.

        Raises:
            ExperimentError: There are too few for any trial.
        """
        if self.pool.size != self._made_for:
            self._policy, self._made_for = self._make_policy(self.pool.size), self.pool.size

    def begin(self, now: float) -> None:
        """The ranks' time counts from now on."""
        self._since = now

    def account(self, now: float) -> None:
        """Time has gone on since the ranks last changed; to be called before they change."""
        seconds = max(0.0, now - self._since)
        self._seconds += self.pool.size * seconds
        self._busy_seconds += self.busy * seconds
        self._since = max(self._since, now)

    @property
    def busy(self) -> int:
        """Number of ranks that are lent."""
        return self.pool.size - self.pool.free

    @property
    def utilisation(self) -> float:
        """Busy rank-seconds over those of all ranks, while they were there."""
        return self._busy_seconds / self._seconds if self._seconds > 0 else 0.0
