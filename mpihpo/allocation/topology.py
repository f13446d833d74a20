"""Which rank is on which node."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpihpo.errors import AllocationError


@dataclass(frozen=True)
class Topology:
    """The nodes of the job's ranks.

    Raises:
        AllocationError: There is no rank, or the nodes are not numbered 0, 1, ... without a gap.
    """

    node_of: tuple[int, ...]
    """Node index per world rank."""
    _ranks_of: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Invert ``node_of``."""
        if not self.node_of or set(self.node_of) != set(range(max(self.node_of) + 1)):
            raise AllocationError(
                f"nodes {sorted(set(self.node_of))} must be numbered from 0 without a gap"
            )
        ranks_of: list[list[int]] = [[] for _ in range(max(self.node_of) + 1)]
        for rank, node in enumerate(self.node_of):
            ranks_of[node].append(rank)
        object.__setattr__(self, "_ranks_of", tuple(map(tuple, ranks_of)))

    @classmethod
    def even(cls, size: int, nodes: int = 1) -> Topology:
        """``size`` ranks in blocks over ``nodes`` nodes, the first ones one rank longer if odd."""
        if not 1 <= nodes <= size:
            raise AllocationError(f"{size} ranks cannot fill {nodes} nodes")
        return cls(tuple(sorted(rank % nodes for rank in range(size))))

    @property
    def size(self) -> int:
        """Number of world ranks."""
        return len(self.node_of)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self._ranks_of)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """World ranks on a node, ascending."""
        return self._ranks_of[node]
