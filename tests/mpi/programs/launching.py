"""Programs that do not end well."""

from __future__ import annotations

import time

from mpi4py import MPI


def hang_on_the_last_rank() -> None:
    print(f"rank {MPI.COMM_WORLD.rank} is here")  # noqa: T201
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        stuck_for_ever()
    MPI.COMM_WORLD.Barrier()


def stuck_for_ever() -> None:
    while True:
        time.sleep(0.1)


def fail_on_the_last_rank() -> None:
    assert MPI.COMM_WORLD.rank < MPI.COMM_WORLD.size - 1, "the reason"
    MPI.COMM_WORLD.Barrier()
