"""Ranks that die, and ranks that are set aside: the others go on and end well."""

from __future__ import annotations

import pytest

from tests.launch import SURVIVE_DEATHS, Mpi, Result, run_programs


@pytest.fixture
def surviving(mpi: Mpi) -> Mpi:
    """An MPI whose job goes on when a rank dies."""
    if mpi.name != "openmpi":
        pytest.skip(f"{mpi.name} ends the job when a rank dies")
    return mpi


def run_with_deaths(mpi: Mpi, ranks: int, program: str) -> Result:
    return run_programs(mpi, ranks, "deaths", program, "end", options=SURVIVE_DEATHS)


def test_survival_is_known(mpi: Mpi) -> None:
    run_programs(mpi, 2, "deaths", "known:no")


def test_survival_is_known_where_it_is_asked_for(surviving: Mpi) -> None:
    run_programs(surviving, 2, "deaths", "known:yes", options=SURVIVE_DEATHS)


def test_mail_goes_on(surviving: Mpi) -> None:
    run_with_deaths(surviving, 4, "mail")


def test_groups_go_on(surviving: Mpi) -> None:
    result = run_with_deaths(surviving, 6, "groups")
    assert "all_reduce: released after" in result.outs[0]


@pytest.mark.parametrize("when", ["before", "half-way", "inside"])
def test_a_member_dies_while_its_group_is_built(surviving: Mpi, when: str) -> None:
    run_with_deaths(surviving, 4, f"building:{when}")


def test_a_rank_dies_beside_a_group_that_is_built(surviving: Mpi) -> None:
    run_with_deaths(surviving, 4, "building_beside_a_death")


def test_rank_0_dies(surviving: Mpi) -> None:
    run_with_deaths(surviving, 4, "rank_0_dies")


def test_a_rank_dies_while_the_world_is_closed(surviving: Mpi) -> None:
    run_with_deaths(surviving, 4, "dies_while_closing")


def test_ranks_that_are_set_aside(mpi: Mpi) -> None:
    run_programs(mpi, 4, "deaths", "set_aside:alone")


def test_a_rank_that_is_set_aside_and_one_that_dies(surviving: Mpi) -> None:
    run_with_deaths(surviving, 4, "set_aside:after a death")


def test_who_does_not_come_is_named(mpi: Mpi) -> None:
    run_programs(mpi, 2, "deaths", "nobody_comes")
