"""When one member fails, the others fall out of what they wait in."""

from __future__ import annotations

from tests.launch import Mpi, run_programs


def test_members_are_released_from_every_kind_of_wait(mpi: Mpi) -> None:
    result = run_programs(
        mpi,
        3,
        "releases",
        "every_kind_of_wait",
        "while_building",
        "a_word_that_comes_early",
        "other_connections_stay",
        timeout=150,
    )
    assert "seconds until all were released" in result.outs[0]
