from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpihpo.allocation import RankPool, Topology, keepers
from mpihpo.allocation.runs import Runs
from mpihpo.errors import AllocationError, InternalError

EIGHT = Topology.even(8, 2)
SIXTEEN = Topology.even(16, 4)


def pool(topology: Topology, taken: tuple[int, ...] = ()) -> RankPool:
    """All ranks of the topology but ``taken`` are free."""
    rank_pool = RankPool(topology, range(topology.size))
    for rank in taken:
        rank_pool.take(1, [rank])
    return rank_pool


def test_one_node_after_the_other() -> None:
    rank_pool = pool(EIGHT)
    assert rank_pool.take(2) == (0, 1)
    assert rank_pool.take(3) == (4, 5, 6)  # two are left on the first node
    assert rank_pool.take(2) == (2, 3)
    assert rank_pool.free == 1
    assert rank_pool.take(1) == (7,)


def test_the_fullest_node_with_room() -> None:
    assert pool(EIGHT, (4, 5)).take(2) == (6, 7)


def test_consecutive_on_the_node() -> None:
    assert pool(Topology.even(8), (1, 3)).take(3) == (4, 5, 6)
    assert pool(Topology.even(8), (1, 4, 6)).take(1) == (0,)
    assert pool(Topology.even(8), (1, 4)).take(2) == (2, 3)


def test_as_few_nodes_as_possible_and_neighbours() -> None:
    assert pool(SIXTEEN).take(8) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert pool(SIXTEEN, (1, 2)).take(8) == (4, 5, 6, 7, 8, 9, 10, 11)
    assert pool(SIXTEEN, (1, 2)).take(6) == (0, 3, 4, 5, 6, 7)
    assert pool(SIXTEEN, (4,)).take(8) == (8, 9, 10, 11, 12, 13, 14, 15)


def test_holder_leads() -> None:
    assert pool(SIXTEEN).take(2, [10]) == (10, 11)
    assert pool(SIXTEEN).take(4, [10]) == (10, 8, 9, 11)
    assert pool(SIXTEEN).take(8, [10]) == (10, 8, 9, 11, 12, 13, 14, 15)


def test_holder_counts_more_than_contiguity() -> None:
    assert pool(EIGHT, (1, 2, 3)).take(4, [0]) == (0, 4, 5, 6)


def test_holder_whose_node_has_room_counts_more() -> None:
    assert pool(EIGHT, (1, 2, 3)).take(4, [0, 5]) == (5, 4, 6, 7)
    assert pool(EIGHT, (1, 2, 3)).take(1, [5, 0]) == (0,)


def test_busy_and_foreign_holders_are_passed_over() -> None:
    assert pool(EIGHT, (0,)).take(2, [0]) == (1, 2)
    assert RankPool(EIGHT, range(1, 8)).take(1, [0]) == (1,)


def test_neighbours_on_a_node_of_a_cyclic_job() -> None:
    assert RankPool(Topology((0, 1) * 4), range(8)).take(2, [2]) == (2, 0)
    assert RankPool(Topology((0, 1) * 4), range(8)).take(4) == (0, 2, 4, 6)


def test_several_at_once_leave_each_other_their_holders() -> None:
    assert pool(Topology.even(4)).take_all([(2, [0]), (2, [1])]) == [(0, 2), (1, 3)]
    assert pool(EIGHT).take_all([(2, []), (4, [1])]) == [(4, 5), (1, 0, 2, 3)]


def test_several_at_once_share_a_node_only_while_it_has_room() -> None:
    assert pool(EIGHT).take_all([(4, [0]), (4, [1])]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert pool(EIGHT).take_all([(4, [0]), (4, [1, 6])]) == [(0, 1, 2, 3), (6, 4, 5, 7)]


def test_training_ranks_may_leave_some_out() -> None:
    rank_pool = RankPool(EIGHT, range(1, 8))
    assert (rank_pool.size, rank_pool.free) == (7, 7)
    assert rank_pool.take(7) == (1, 2, 3, 4, 5, 6, 7)
    assert not rank_pool.is_free(0)


def test_impossible_requests() -> None:
    rank_pool = pool(EIGHT)
    with pytest.raises(AllocationError, match=r"\[9\] of 8 free"):
        rank_pool.take(9)
    with pytest.raises(AllocationError):
        rank_pool.take(0)
    with pytest.raises(AllocationError):
        rank_pool.take_all([(4, []), (5, [])])
    assert rank_pool.free == 8
    rank_pool.take(8)
    with pytest.raises(AllocationError):
        rank_pool.take(1)


def test_wrong_releases() -> None:
    rank_pool = RankPool(EIGHT, range(1, 8))
    rank_pool.take(1)
    rank_pool.release([1])
    for rank in (1, 0, 8):
        with pytest.raises(InternalError, match=f"rank {rank} "):
            rank_pool.release([rank])
    assert rank_pool.free == 7


@pytest.mark.parametrize("ranks", [(), (1, 1), (0, 8), (-1, 0)])
def test_wrong_training_ranks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(AllocationError, match="training ranks"):
        RankPool(EIGHT, ranks)


def test_a_retired_rank_is_not_given_away_until_it_is_back() -> None:
    rank_pool = pool(EIGHT)
    rank_pool.retire(5)
    assert (rank_pool.size, rank_pool.free, rank_pool.is_free(5)) == (7, 7, False)
    assert rank_pool.ranks == (0, 1, 2, 3, 4, 6, 7)
    assert 5 not in rank_pool
    assert rank_pool.take(4, prefer=[5]) == (0, 1, 2, 3)
    assert rank_pool.take(3) == (4, 6, 7)
    rank_pool.readmit(5)
    assert (rank_pool.size, rank_pool.free) == (8, 1)
    assert 5 in rank_pool
    assert rank_pool.take(1) == (5,)


def test_a_taken_rank_may_be_retired_and_is_free_when_it_is_back() -> None:
    rank_pool = pool(EIGHT)
    taken = rank_pool.take(2)
    rank_pool.retire(taken[1])
    assert (rank_pool.size, rank_pool.free) == (7, 6)
    rank_pool.release(taken[:1])
    assert (rank_pool.size, rank_pool.free) == (7, 7)
    with pytest.raises(InternalError, match="rank 1 is released but was not taken"):
        rank_pool.release([1])
    rank_pool.readmit(1)
    assert (rank_pool.size, rank_pool.free) == (8, 8)


def test_every_rank_may_be_retired() -> None:
    rank_pool = pool(Topology.even(2))
    for rank in (0, 1, 1):
        rank_pool.retire(rank)
    assert (rank_pool.size, rank_pool.free, rank_pool.ranks) == (0, 0, ())
    with pytest.raises(AllocationError, match=r"cannot take \[1\] of 0 free ranks"):
        rank_pool.take(1)
    rank_pool.readmit(1)
    assert rank_pool.take(1) == (1,)


def test_wrong_retirements() -> None:
    rank_pool = RankPool(EIGHT, range(1, 8))
    with pytest.raises(InternalError, match="rank 0 is lost but never trained"):
        rank_pool.retire(0)
    with pytest.raises(InternalError, match="rank 1 is back but was not lost"):
        rank_pool.readmit(1)
    rank_pool.retire(1)
    rank_pool.readmit(1)
    with pytest.raises(InternalError, match="rank 1 is back but was not lost"):
        rank_pool.readmit(1)


def test_keepers() -> None:
    assert keepers((2, 0, 1), EIGHT) == (2,)
    assert keepers((2, 0, 5, 6), EIGHT) == (2, 5)
    assert keepers((6, 1, 2), EIGHT) == (6, 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_runs_are_a_set(steps: list[tuple[bool, int, int]]) -> None:
    runs, model = Runs(), set[int]()
    for adding, number, near in steps:
        if adding and number not in model:
            runs.add(number)
            model.add(number)
        elif not adding and model:
            count = number + 1
            start, stop = runs.window(count, None if near in model else near)
            assert set(range(start, stop)) <= model
            whole = [n for n in model if all(n + k in model for k in range(count))]
            assert stop - start == count if whole else stop - start < count
            runs.remove(start, stop)
            model -= set(range(start, stop))
        assert len(runs) == len(model)
        assert [n for n in range(31) if n in runs] == sorted(model)


topologies = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=5).map(
        lambda sizes: Topology(tuple(node for node, size in enumerate(sizes) for _ in range(size)))
    ),
    st.builds(
        lambda size, nodes: Topology(tuple(r % nodes for r in range(size * nodes))),
        st.integers(1, 5),
        st.integers(1, 4),
    ),
)


def fewest_nodes(free: set[int], topology: Topology, count: int, skip: int | None = None) -> int:
    """Nodes that ``count`` free ranks must span."""
    rooms = sorted(
        (
            len(free.intersection(topology.ranks_of(node)))
            for node in range(topology.nodes)
            if node != skip
        ),
        reverse=True,
    )
    nodes = 0
    while count > 0:
        count -= rooms[nodes]
        nodes += 1
    return nodes


@given(topology=topologies, data=st.data())
def test_pool_against_a_model(topology: Topology, data: st.DataObject) -> None:
    everyone = set(range(topology.size))
    trained = data.draw(st.sets(st.sampled_from(sorted(everyone)), min_size=1))
    rank_pool = RankPool(topology, sorted(trained))
    free, lent, lost = set(trained), list[tuple[int, ...]](), set[int]()
    for _ in range(data.draw(st.integers(1, 15))):
        if lost and data.draw(st.integers(0, 3)) == 0:
            rank = data.draw(st.sampled_from(sorted(lost)))
            rank_pool.readmit(rank)
            lost.remove(rank)
            free.add(rank)
        elif lost != trained and (not (free or lent) or data.draw(st.integers(0, 3)) == 0):
            rank = data.draw(st.sampled_from(sorted(trained - lost)))
            rank_pool.retire(rank)
            lost.add(rank)
            free.discard(rank)
            lent = [tuple(each for each in ranks if each != rank) for ranks in lent]
        elif free and (not lent or data.draw(st.booleans())):
            width = data.draw(st.integers(1, len(free)))
            prefer = data.draw(st.lists(st.sampled_from(sorted(everyone)), max_size=2, unique=True))
            ranks = rank_pool.take(width, prefer)
            assert len(ranks) == len(set(ranks)) == width
            assert set(ranks) <= free
            nodes = {topology.node_of[rank] for rank in ranks}
            preferred = free.intersection(prefer)
            if preferred:
                home = topology.node_of[ranks[0]]
                assert ranks[0] in preferred
                assert list(ranks[1:]) == sorted(ranks[1:])
                rest = width - len(free.intersection(topology.ranks_of(home)))
                assert len(nodes) == 1 + fewest_nodes(free, topology, rest, skip=home)
            else:
                assert list(ranks) == sorted(ranks)
                assert len(nodes) == fewest_nodes(free, topology, width)
            free -= set(ranks)
            lent.append(ranks)
        elif lent:
            ranks = lent.pop(data.draw(st.integers(0, len(lent) - 1)))
            rank_pool.release(ranks)
            free |= set(ranks)
        assert rank_pool.free == len(free)
        assert rank_pool.ranks == tuple(sorted(trained - lost))
        assert rank_pool.size == len(rank_pool.ranks)
        assert {rank for rank in everyone if rank in rank_pool} == trained - lost
        assert {rank for rank in everyone if rank_pool.is_free(rank)} == free


@given(topology=topologies, data=st.data())
def test_several_at_once_against_a_model(topology: Topology, data: st.DataObject) -> None:
    rank_pool = RankPool(topology, range(topology.size))
    requests, left = [], topology.size
    while left and len(requests) < 6:
        width = data.draw(st.integers(1, left))
        prefer = data.draw(st.lists(st.integers(0, topology.size - 1), max_size=2, unique=True))
        requests.append((width, prefer))
        left -= width
    placed = rank_pool.take_all(requests)
    assert [len(ranks) for ranks in placed] == [width for width, _ in requests]
    taken = [rank for ranks in placed for rank in ranks]
    assert len(taken) == len(set(taken)) == topology.size - rank_pool.free
    assert set(taken) <= set(range(topology.size))
    if requests[0][1]:
        assert placed[0][0] in requests[0][1]  # the most important one always has its holder
