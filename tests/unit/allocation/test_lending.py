from __future__ import annotations

from collections.abc import Sequence

import pytest

from mpihpo.allocation import AllocationSettings, Lender, Request, Topology, build_policy
from mpihpo.errors import AllocationError, ExperimentError
from mpihpo.records import Evaluation
from tests.unit.virtual_clock import evaluation

FOUR = Topology.even(4)


class Sharing:
    """One rank each, and whatever shares a test wants."""

    def __init__(self, *shares: int) -> None:
        self.shares = list(shares)

    def width(self, work: Evaluation) -> int:
        return 1

    def share(self, work: Sequence[Evaluation], free: int) -> list[int]:
        return self.shares


def requests(*least: int) -> list[Request]:
    return [Request(evaluation(i), each, ()) for i, each in enumerate(least)]


def test_no_trial_gets_fewer_ranks_than_it_is_known_to_need() -> None:
    lender = Lender(lambda size: Sharing(1, 1), FOUR, range(4))
    assert lender.lend(requests(1, 2, 1)) == [(0,), (1, 2), (3,)]
    assert lender.busy == 4
    assert lender.width(requests(9)[0]) == 4


@pytest.mark.parametrize("shares", [(1,), (1, 1, 1), (0, 1), (2, 2), ()])
def test_shares_that_do_not_add_up_are_refused(shares: tuple[int, ...]) -> None:
    lender = Lender(lambda size: Sharing(*shares), FOUR, range(4))
    with pytest.raises(AllocationError, match=r"Sharing shares 4 free ranks among 3 as \["):
        lender.lend(requests(1, 2, 1))
    assert lender.busy == 0


def test_the_policy_is_asked_for_when_the_number_of_ranks_changes() -> None:
    sizes = []

    def policy(size: int) -> Sharing:
        sizes.append(size)
        if size < 3:
            raise ExperimentError("allocation.ranks", "3 is too many")
        return Sharing(size)

    lender = Lender(policy, FOUR, range(4))
    lender.renew_policy()
    assert sizes == [4]
    lender.pool.retire(2)
    lender.renew_policy()
    lender.pool.retire(2)
    lender.renew_policy()
    assert sizes == [4, 3]
    lender.pool.retire(3)
    with pytest.raises(ExperimentError, match="too many"):
        lender.renew_policy()
    lender.pool.readmit(2)
    lender.renew_policy()
    assert lender.lend(requests(1)) == [(0, 1, 2)]


def test_utilisation() -> None:
    lender = Lender(
        lambda size: build_policy(AllocationSettings(), reduction_factor=2, world_size=size),
        FOUR,
        range(4),
    )
    lender.begin(10.0)
    assert lender.utilisation == 0.0
    (ranks,) = lender.lend(requests(1))
    assert len(ranks) == 4
    lender.account(12.0)  # 8 of 8
    lender.pool.retire(3)
    lender.account(14.0)  # 6 of 6
    lender.pool.release(ranks[:3])
    lender.account(16.0)  # 0 of 6
    lender.account(15.0)
    assert lender.utilisation == pytest.approx(14 / 20)
