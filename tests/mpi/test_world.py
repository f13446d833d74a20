"""The world over any communicator."""

from __future__ import annotations

from tests.launch import Mpi, run_programs


def test_world(mpi: Mpi) -> None:
    run_programs(
        mpi,
        4,
        "worlds",
        "agreement",
        "errors_that_cannot_travel",
        "closing",
        "the_callers_messages_are_the_callers",
        "other_communicators",
        "nodes",
    )
