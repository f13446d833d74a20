"""The section ``allocation`` of the experiment, and the policies that it can name."""

from __future__ import annotations

from dataclasses import dataclass

from mpihpo.allocation.policies import AllocationPolicy, Doubling, Fixed
from mpihpo.errors import ExperimentError
from mpihpo.settings import check_integer, load_class

POLICIES: dict[str, type[AllocationPolicy]] = {
    "fixed": Fixed,
    "doubling": Doubling,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSettings:
    """How many ranks a trial gets.

    Raises:
        ExperimentError: A value is impossible; names its dotted key.
    """

    policy: str = "doubling"
    """A name of ``POLICIES``, or ``package.module:Name``."""
    ranks: int = 1
    """Per trial on the first rung."""
    max_ranks: int | None = None
    """No trial gets more; None: up to all."""

    def __post_init__(self) -> None:
        """Check each value."""
        load_class(self.policy, POLICIES, "allocation.policy")
        check_integer(self.ranks, "allocation.ranks", least=1)
        if self.max_ranks is not None:
            check_integer(self.max_ranks, "allocation.max_ranks", least=1)
            if self.max_ranks < self.ranks:
                raise ExperimentError(
                    "allocation.max_ranks",
                    f"{self.max_ranks} is less than allocation.ranks, which is {self.ranks}",
                )


def build_policy(
    settings: AllocationSettings, *, reduction_factor: int, world_size: int
) -> AllocationPolicy:
    """A fresh policy for ``world_size`` training ranks.

    Raises:
        ExperimentError: A trial needs more ranks than there are.
    """
    if settings.ranks > world_size:
        raise ExperimentError(
            "allocation.ranks",
            f"{settings.ranks} ranks per trial is more than the job's training ranks; "
            f"expected at most {world_size}",
        )
    cls = load_class(settings.policy, POLICIES, "allocation.policy")
    return cls(settings=settings, reduction_factor=reduction_factor, world_size=world_size)
