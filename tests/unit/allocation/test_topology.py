from __future__ import annotations

import pytest

from mpihpo.allocation import Topology
from mpihpo.errors import AllocationError


def test_ranks_by_node() -> None:
    cyclic = Topology((0, 1, 2, 0, 1))
    assert (cyclic.size, cyclic.nodes) == (5, 3)
    assert [cyclic.ranks_of(node) for node in range(3)] == [(0, 3), (1, 4), (2,)]


def test_even() -> None:
    assert Topology.even(7, 2).node_of == (0, 0, 0, 0, 1, 1, 1)
    assert Topology.even(3).node_of == (0, 0, 0)


def test_equal_topologies_compare_equal() -> None:
    assert Topology.even(4, 2) == Topology((0, 0, 1, 1))
    assert hash(Topology.even(4, 2)) == hash(Topology((0, 0, 1, 1)))


@pytest.mark.parametrize("node_of", [(), (1, 2), (0, 2)])
def test_nodes_are_numbered_from_0(node_of: tuple[int, ...]) -> None:
    with pytest.raises(AllocationError, match="numbered from 0"):
        Topology(node_of)


def test_more_nodes_than_ranks() -> None:
    with pytest.raises(AllocationError, match="2 ranks cannot fill 3 nodes"):
        Topology.even(2, 3)
