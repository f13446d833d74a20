"""Worlds of any size, a rank that only coordinates, several nodes, state that travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import Mpi
from tests.system.experiments import ON_FAKE_NODES, Finished, run_experiment

TRIALS = (5, 2, 7, 1, 8, 3, 6, 4)
HALVING = {"scheduler": "successive_halving", "max_epochs": 4}


def ladder(finished: Finished) -> list[tuple[int, int, list[int]]]:
    return [
        (entry["rung"], entry["evaluated"], entry["promoted"]) for entry in finished.entries("rung")
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_makes_the_same_decisions(mpi: Mpi, tmp_path: Path, ranks: int):
    finished = run_experiment(
        mpi, ranks, tmp_path, "light:counted", space={"x": TRIALS}, schedule=HALVING
    )
    # By hand: x is the loss, so that trials 3, 1, 5, 7 (1, 2, 3, 4) go on, then 3 and 1.
    assert ladder(finished) == [(0, 8, [3, 1, 5, 7]), (1, 4, [3, 1]), (2, 2, [])]
    assert finished.results.best is not None
    assert finished.results.best.config == {"x": 1}
    # The train function reported how many ranks it really had.
    reported = {
        (outcome["trial"], outcome["stop"]): outcome["reports"][-1][1]["ranks"]
        for outcome in finished.outcomes
    }
    lent = {(o["trial"], o["stop"]): len(o["ranks"]) for o in finished.outcomes}
    assert reported == lent
    assert {rank for o in finished.outcomes for rank in o["ranks"]} == set(range(ranks))
    widths = [{len(o["ranks"]) for o in finished.outcomes if o["rung"] == k} for k in range(3)]
    # Twice as many on each rung, and in addition those that no other trial can use.
    assert (
        widths
        == {
            1: [{1}, {1}, {1}],
            2: [{1}, {2}, {2}],
            3: [{1}, {3}, {3}],
            5: [{1}, widths[1] & {2, 3, 5}, {5}],
        }[ranks]
    )
    assert finished.output


def test_a_dedicated_rank_only_coordinates(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        2,
        tmp_path,
        "light:counted",
        space={"x": TRIALS},
        schedule=HALVING,
        coordinator="dedicated",
    )
    assert ladder(finished)[-1] == (2, 2, [])
    assert {outcome["ranks"] for outcome in finished.outcomes} == {(1,)}
    assert finished.results.ranks["busy"][0] == 0


def test_groups_stay_inside_a_node_and_keep_a_copy_on_the_next(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        4,
        tmp_path,
        "light:counted",
        program=[str(ON_FAKE_NODES), "2"],
        space={"x": TRIALS},
        schedule=HALVING,
    )
    assert list(finished.results.ranks["node"]) == ["node0", "node0", "node1", "node1"]
    assert [entry["evaluated"] for entry in finished.entries("rung")] == [8, 4, 2]
    pairs = [outcome for outcome in finished.outcomes if len(outcome["ranks"]) == 2]
    assert pairs
    assert {frozenset(outcome["ranks"]) for outcome in pairs} <= {
        frozenset({0, 1}),
        frozenset({2, 3}),
    }
    across = [outcome for outcome in finished.outcomes if len(outcome["ranks"]) == 4]
    assert across
    for outcome in across:
        assert outcome["keepers"][0] == outcome["ranks"][0]
        assert {rank // 2 for rank in outcome["keepers"]} == {0, 1}


def test_state_is_fetched_from_a_rank_outside_of_the_group(mpi: Mpi, tmp_path: Path):
    # Rank 1 is busy with the slow trial 1 while rank 0 trains all others, so that both trials
    # that go on are kept by rank 0, and rank 1 has to fetch one.
    finished = run_experiment(
        mpi,
        2,
        tmp_path,
        "light:counted",
        space={"x": (1, 4, 2, 3)},
        schedule={"scheduler": "successive_halving", "max_epochs": 2},
        allocation={"policy": "fixed"},
        arguments={"slow": 4},
    )
    fetched = [
        outcome
        for outcome in finished.outcomes
        if outcome["start"] > 0 and not set(outcome["holders"]) & set(outcome["ranks"])
    ]
    assert [outcome["ending"] for outcome in fetched] == ["finished"]
