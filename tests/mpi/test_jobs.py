"""Jobs through ``mpihpo.run``, on one rank and on several."""

from __future__ import annotations

import json

from tests.launch import Mpi, run_programs


def test_the_number_of_ranks_decides_about_nothing(mpi: Mpi) -> None:
    outcomes = {}
    for ranks in (1, 3, 4, 5):
        result = run_programs(mpi, ranks, "jobs", "deterministic")
        outcomes[ranks] = json.loads(result.outs[0])
        assert outcomes[ranks] == outcomes[1], f"{ranks} ranks"
    assert len(outcomes[1]["configurations"]) == 11
    reached = [rung for rung, _ in outcomes[1]["reached"]]
    assert [sum(rung >= each for rung in reached) for each in range(4)] == [11, 5, 2, 1]


def test_jobs_without_torch(mpi: Mpi) -> None:
    run_programs(
        mpi,
        4,
        "jobs",
        "dedicated_coordinator",
        "attributes_communicate_nothing",
        "means",
        "batches_of_resized_trials",
        "the_cache_lasts",
        "a_failing_member",
        "wrong_experiments",
        "a_searcher_that_exits",
        "embedded",
        timeout=150,
    )


def test_dedicated_coordinator_with_one_rank_to_train(mpi: Mpi) -> None:
    run_programs(mpi, 2, "jobs", "dedicated_coordinator")


def test_jobs_with_torch(mpi: Mpi) -> None:
    programs = ("shares", "one_rank_trials", "resized_trials", "failing_members", "left_behind")
    run_programs(mpi, 5, "torch_jobs", *programs, timeout=150)
