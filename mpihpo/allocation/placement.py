"""Which ranks: node-contiguous where possible, and on a rank that holds the trial's state.

A free holder of the state is always a member, also where another node had more room: the state
then enters the new group without a message of its own. Beyond that, in this order: inside one node
when it has room (the fullest one that has), as few nodes as possible, neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from mpihpo.allocation.runs import Runs
from mpihpo.allocation.topology import Topology
from mpihpo.errors import AllocationError, InternalError


def keepers(
    ranks: Sequence[int], topology: Topology, *, always_two: bool = False
) -> tuple[int, ...]:
    """Who keeps a trial's state: the leader, and the first member on another node if any.

    ``always_two``: else another member, if there is one.
    """
    node_of = topology.node_of
    home = node_of[ranks[0]]
    near = ranks[1] if always_two and len(ranks) > 1 else None
    other = next((rank for rank in ranks if node_of[rank] != home), near)
    return (ranks[0],) if other is None else (ranks[0], other)


class RankPool:
    """The training ranks that are free.

    Taking or releasing ranks costs what the touched nodes and ranks cost, not what the world does.
    """

    def __init__(self, topology: Topology, ranks: Collection[int]) -> None:
        """Start with all of ``ranks`` free.

        Raises:
            AllocationError: A rank is not in the topology or named twice, or there is none.
        """
        if not ranks or len(set(ranks)) != len(ranks):
            raise AllocationError(f"training ranks {tuple(ranks)} must be distinct, at least one")
        if min(ranks) < 0 or max(ranks) >= topology.size:
            raise AllocationError(
                f"training ranks {min(ranks)} to {max(ranks)} are not all among the job's "
                f"{topology.size} ranks"
            )
        self._node_of = topology.node_of
        self._topology = topology
        # Neighbours are neighbours on the node, however the launcher numbered the ranks.
        self._position: dict[int, int] = {}
        self._retired: dict[int, int] = {}
        self._free_on: list[Runs] = [Runs() for _ in range(topology.nodes)]
        self._nodes_with: dict[int, Runs] = {}  # nodes by the number of their free ranks
        self._rooms: list[int] = []
        self._free = 0
        members = set(ranks)
        for node in range(topology.nodes):
            for position, rank in enumerate(topology.ranks_of(node)):
                if rank in members:
                    self._position[rank] = position
        self.release(ranks)

    @property
    def free(self) -> int:
        """Number of free ranks."""
        return self._free

    @property
    def size(self) -> int:
        """Number of training ranks, free or not."""
        return len(self._position)

    def __contains__(self, rank: int) -> bool:
        """Whether a rank trains, free or not, and is not lost."""
        return rank in self._position

    @property
    def ranks(self) -> tuple[int, ...]:
        """The training ranks, free or not, in ascending order."""
        return tuple(sorted(self._position))

    def retire(self, rank: int) -> None:
        """A rank is lost, maybe not for the first time: it counts no more and is not given away.

        Raises:
            InternalError: It never trained.
        """
        if rank in self._retired:
            return
        if rank not in self._position:
            raise InternalError(f"rank {rank} is lost but never trained")
        if self.is_free(rank):
            self._remove(rank)
        self._retired[rank] = self._position.pop(rank)

    def readmit(self, rank: int) -> None:
        """A retired rank is back, and free.

        Raises:
            InternalError: It was not retired.
        """
        if rank not in self._retired:
            raise InternalError(f"rank {rank} is back but was not lost")
        self._position[rank] = self._retired.pop(rank)
        self.release([rank])

    def is_free(self, rank: int) -> bool:
        """Whether a training rank is free; other ranks never are."""
        position = self._position.get(rank)
        return position is not None and position in self._free_on[self._node_of[rank]]

    def take(self, width: int, prefer: Collection[int] = ()) -> tuple[int, ...]:
        """Take ``width`` ranks: a preferred one, if free, in front, the others ascending.

        Raises:
            AllocationError: ``width`` is below 1 or above ``free``.
        """
        return self.take_all([(width, prefer)])[0]

    def take_all(self, requests: Sequence[tuple[int, Collection[int]]]) -> list[tuple[int, ...]]:
        """Take ranks for several (width, preferred ranks) at once, the most important one first.

        No request is given a rank that another one prefers while its node has others.

        Raises:
            AllocationError: A width is below 1, or their sum above ``free``.
        """
        widths = [width for width, _ in requests]
        if min(widths, default=1) < 1 or sum(widths) > self._free:
            raise AllocationError(f"cannot take {widths} of {self._free} free ranks")
        anchors: list[int | None] = []
        anchored_on: defaultdict[int, list[int]] = defaultdict(list)
        for i, (width, prefer) in enumerate(requests):
            anchor = self._anchor(width, prefer)
            anchors.append(anchor)
            if anchor is not None:
                self._remove(anchor)
                anchored_on[self._node_of[anchor]].append(i)
        taken: dict[int, tuple[int, ...]] = {}
        for i, width in enumerate(widths):
            anchor = anchors[i]
            if anchor is None:
                continue
            node = self._node_of[anchor]
            others = anchored_on[node]
            others.remove(i)
            # One node for this request is worth more than the place of a less important one.
            while others and len(self._free_on[node]) < width - 1:
                loser = others.pop()
                lost = anchors[loser]
                assert lost is not None
                anchors[loser] = None
                self._add(node, [self._position[lost]])
            taken[i] = (anchor, *sorted(self._gather(width - 1, anchor)))
        for i, (width, prefer) in enumerate(requests):
            if i in taken:
                continue
            anchor = self._anchor(width, prefer)
            if anchor is None:
                taken[i] = tuple(sorted(self._gather(width, None)))
            else:
                self._remove(anchor)
                taken[i] = (anchor, *sorted(self._gather(width - 1, anchor)))
        return [taken[i] for i in range(len(requests))]

    def release(self, ranks: Iterable[int]) -> None:
        """Make ranks free again.

        Raises:
            InternalError: A rank is free already or does not train.
        """
        positions: defaultdict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            if rank not in self._position or self.is_free(rank):
                raise InternalError(f"rank {rank} is released but was not taken")
            positions[self._node_of[rank]].append(self._position[rank])
        for node, on_node in positions.items():
            self._add(node, on_node)

    def _anchor(self, width: int, prefer: Collection[int]) -> int | None:
        """A free preferred rank: on the fullest node with room for all, else the first one."""
        free = [rank for rank in prefer if self.is_free(rank)]
        if len(free) < 2:
            return free[0] if free else None
        rooms = [len(self._free_on[self._node_of[rank]]) for rank in free]
        fitting = [i for i, room in enumerate(rooms) if room >= width]
        return free[min(fitting, key=rooms.__getitem__)] if fitting else free[0]

    def _gather(self, count: int, anchor: int | None) -> list[int]:
        """Take ``count`` further ranks, near the anchor if there is one."""
        ranks: list[int] = []
        near = None
        if anchor is not None:
            near = self._node_of[anchor]
            self._take_on(near, count, self._position[anchor], ranks)
        while len(ranks) < count:
            missing = count - len(ranks)
            i = bisect_left(self._rooms, missing)
            if i < len(self._rooms):
                near, _ = self._nodes_with[self._rooms[i]].window(1, near)
                self._take_on(near, missing, None, ranks)
            else:  # whole nodes with the most free ranks: as few nodes as possible
                room = self._rooms[-1]
                start, stop = self._nodes_with[room].window(missing // room, near)
                for node in range(start, stop):
                    self._take_on(node, room, None, ranks)
                near = stop - 1
        return ranks

    def _take_on(self, node: int, count: int, near: int | None, ranks: list[int]) -> None:
        """Take up to ``count`` free ranks of one node, neighbours if possible."""
        free = self._free_on[node]
        before = len(free)
        count = min(count, before)
        on_node = self._topology.ranks_of(node)
        while count:
            start, stop = free.window(count, near)
            free.remove(start, stop)
            ranks.extend(on_node[start:stop])
            count -= stop - start
            near = stop - 1
        self._move(node, before)

    def _remove(self, rank: int) -> None:
        node, position = self._node_of[rank], self._position[rank]
        before = len(self._free_on[node])
        self._free_on[node].remove(position, position + 1)
        self._move(node, before)

    def _add(self, node: int, positions: Iterable[int]) -> None:
        free = self._free_on[node]
        before = len(free)
        for position in positions:
            free.add(position)
        self._move(node, before)

    def _move(self, node: int, before: int) -> None:
        """Enter the node under its present number of free ranks."""
        after = len(self._free_on[node])
        if after == before:
            return
        self._free += after - before
        if before:
            self._nodes_with[before].remove(node, node + 1)
            if not self._nodes_with[before]:
                del self._nodes_with[before]
                del self._rooms[bisect_left(self._rooms, before)]
        if after:
            if after not in self._nodes_with:
                self._nodes_with[after] = Runs()
                insort(self._rooms, after)
            self._nodes_with[after].add(node)
