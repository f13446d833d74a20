"""ON WHICH RANKS: how many ranks an evaluation gets, and which ones."""

from mpihpo.allocation.lending import Lender, Request
from mpihpo.allocation.placement import RankPool, keepers
from mpihpo.allocation.policies import AllocationPolicy, Doubling, Fixed
from mpihpo.allocation.settings import POLICIES, AllocationSettings, build_policy
from mpihpo.allocation.topology import Topology

__all__ = [
    "POLICIES",
    "AllocationPolicy",
    "AllocationSettings",
    "Doubling",
    "Fixed",
    "Lender",
    "RankPool",
    "Request",
    "Topology",
    "build_policy",
    "keepers",
]
