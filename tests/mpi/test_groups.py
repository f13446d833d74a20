"""Groups: communicator and process group over the ranks of one evaluation."""

from __future__ import annotations

from tests.launch import Mpi, run_programs


def test_groups_of_every_size_and_order(mpi: Mpi) -> None:
    run_programs(
        mpi,
        4,
        "groups",
        "every_size",
        "distributed_training",
        "same_and_changing_ranks",
        "a_running_group_never_waits",
        "quick_members",
        "serials_beyond_the_largest_tag",
        timeout=150,
    )


def test_an_odd_number_of_ranks(mpi: Mpi) -> None:
    run_programs(mpi, 5, "groups", "every_size", timeout=150)


def test_making_a_group_sends_nothing_that_a_mailbox_reads(mpi: Mpi) -> None:
    run_programs(mpi, 2, "groups", "tags_of_groups_and_of_messages", timeout=150)


def test_thousands_of_groups_leave_nothing(mpi: Mpi) -> None:
    programs = ("many_communicators", "many_process_groups", "one_rank_groups")
    run_programs(mpi, 2, "groups", *programs, "a_group_of_the_embedding_program", timeout=150)
