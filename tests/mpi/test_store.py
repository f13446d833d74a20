"""The store through which a process group is built."""

from __future__ import annotations

from tests.launch import Mpi, run_programs


def test_store_over_mpi(mpi: Mpi) -> None:
    run_programs(
        mpi,
        4,
        "stores",
        "keys_and_values",
        "a_missing_key_is_named",
        "counters_are_atomic",
        "answers_as_torch_does",
        "early_and_late_messages",
        "a_member_that_never_comes",
    )
