"""The fixture ``mpi``: a test that takes it runs once under each MPI."""

from __future__ import annotations

import pytest

from tests.launch import MPIS, Mpi


@pytest.fixture(params=MPIS, ids=lambda each: each.name)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    chosen: Mpi = request.param
    if chosen.problem:
        pytest.skip(chosen.problem)
    return chosen
