"""The communicator that a training function gets."""

from __future__ import annotations

from tests.launch import Mpi, run_programs


def test_it_does_what_mpi4py_does(mpi: Mpi) -> None:
    run_programs(mpi, 4, "interruptibles", "same_results", "children", "no_wait_was_forgotten")


def test_every_wait_can_be_left(mpi: Mpi) -> None:
    run_programs(mpi, 2, "interruptibles", "every_wait_can_be_left")
