"""Ranks that are stuck: the others go on, and end without them."""

from __future__ import annotations

import pytest

from tests.launch import Mpi, run_programs

MODULE = "stuck_ranks"
SERIALIZED = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}


@pytest.mark.parametrize("rank", ["comes_back_too_late", "rank_0_comes_back_too_late"])
def test_a_rank_that_is_back_when_the_job_is_over(mpi: Mpi, rank: str) -> None:
    run_programs(mpi, 4, MODULE, rank)


def test_a_member_of_a_trial(mpi: Mpi) -> None:
    run_programs(mpi, 4, MODULE, "of_a_trial_of_several:012")


def test_the_rank_that_watches_over_the_dispatcher(mpi: Mpi) -> None:
    run_programs(mpi, 4, MODULE, "watches_over_the_dispatcher")


def test_rank_0_without_a_sign_of_life(mpi: Mpi) -> None:
    run_programs(mpi, 3, MODULE, "holds_the_gil")


def test_a_fault_of_the_runtime_meanwhile(mpi: Mpi) -> None:
    run_programs(mpi, 4, MODULE, "while_a_fault_ends_the_job")


def test_the_signal_that_interrupts_may_have_a_handler(mpi: Mpi) -> None:
    run_programs(mpi, 2, MODULE, "with_a_handler_of_the_host")


def test_where_threads_may_not_call_mpi(mpi: Mpi) -> None:
    programs = ("comes_back_too_late", "of_a_trial_of_several:1")
    run_programs(mpi, 4, MODULE, *programs, env=SERIALIZED)
