"""Slurm's daemons, started once per test session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.launch import MPIS
from tests.system.slurm.cluster import CannotStart, Cluster

REQUIRED = "MPIHPO_TEST_REQUIRE_SLURM"
"""Set where Slurm must be there: what would skip the tests is then an error."""


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    try:
        if MPIS[0].name != "mpich":
            raise CannotStart(f"srun --mpi=pmi2 starts ranks of MPICH, and here is {MPIS[0].name}")
        cluster = Cluster()
    except CannotStart as problem:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but {problem}", pytrace=False)
        pytest.skip(str(problem))
    yield cluster
    cluster.stop()
