"""A trial's state on its way through groups of other sizes."""

from __future__ import annotations

from tests.launch import Mpi, run_programs


def test_state_moves_with_its_trial(mpi: Mpi) -> None:
    run_programs(
        mpi,
        4,
        "handovers",
        "fingerprints",
        "everything:gloo",
        "everything:none",
        "generators_continue",
        "what_does_not_fit",
        "wrong_attachments",
        timeout=150,
    )
