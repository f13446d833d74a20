"""The world: agreement, nodes, and what it leaves of the caller's communicator."""

from __future__ import annotations

import os
import time

from mpi4py import MPI

from mpihpo.comm.group import Group
from mpihpo.comm.mailbox import Tag
from mpihpo.comm.world import NODE_NAME_VARIABLE, World
from mpihpo.errors import ExperimentError, TeardownError
from tests.mpi.programs.surroundings import error_from, group_of, world_and_agent


def agreement() -> None:
    with world_and_agent() as (world, _):
        assert world.on_root(lambda: ("ran on", world.rank)) == ("ran on", 0)
        text = error_from(
            ExperimentError, world.on_root, lambda: impossible("batch.size", "0 is too small")
        )
        assert text == "batch.size: 0 is too small"

        world.agree(None)
        own = ExperimentError("train", f"rank {world.rank}") if world.rank else None
        text = error_from(ExperimentError, world.agree, own)
        assert text == "train: rank 1"  # the lowest rank that has one


def impossible(where: str, problem: str) -> None:
    raise ExperimentError(where, problem)


def errors_that_cannot_travel() -> None:
    """An error that cannot be pickled must not leave the other ranks waiting."""

    class LocalError(Exception):
        pass

    class DemandingError(Exception):
        def __init__(self, one: int, *, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail() -> None:
        raise LocalError("the reason")

    def fail_on_loading() -> None:
        raise TwoArgumentsError(1, 2)

    with world_and_agent() as (world, _):
        for function in (fail, fail_on_loading):
            assert "the reason" in error_from(Exception, world.on_root, function)
        own = DemandingError(1, two=2) if world.rank == 1 else None
        assert "1 and 2" in error_from(Exception, world.agree, own)


class TwoArgumentsError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"the reason: {one}, {two}")


def closing() -> None:
    """Late words do not matter; a group that is left over does; twice is harmless."""
    for _ in range(5):
        world = World(MPI.COMM_WORLD)
        for rank in range(world.size):
            world.mailbox.post(("late", bytes(100_000)), rank, Tag.MEMBER)
        world.close()
        world.close()

    world = World(MPI.COMM_WORLD)
    everybody = tuple(range(world.size))
    group = Group(world, 5, everybody, None)
    group.build()
    assert "communicator 5" in error_from(TeardownError, world.close)
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


def the_callers_messages_are_the_callers() -> None:
    comm = MPI.COMM_WORLD.Dup()
    comm.Set_name("the caller's")
    handler = comm.Get_errhandler()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = [comm.isend((tag, comm.rank), right, int(tag)) for tag in Tag]
    with world_and_agent(comm) as (world, agent):
        with group_of(world, agent, 1, tuple(range(world.size)), None) as group:
            group.comm.Barrier()
        assert world.mailbox.take(Tag.EVENT) is None
        assert world.mailbox.discard_all() == 0
    for tag in Tag:
        assert comm.recv(source=left, tag=int(tag)) == (tag, left)
    MPI.Request.waitall(requests)
    assert comm.Get_name() == "the caller's"
    assert comm.Get_errhandler() == handler
    comm.Free()


def other_communicators() -> None:
    everybody = MPI.COMM_WORLD
    backwards = everybody.Split(0, -everybody.rank)
    with world_and_agent(backwards) as (world, agent):
        assert world.rank == everybody.size - 1 - everybody.rank
        assert world.on_root(lambda: everybody.rank) == everybody.size - 1
        with group_of(world, agent, 1, tuple(range(world.size))[::-1], None) as group:
            assert group.comm.allgather(everybody.rank) == list(range(everybody.size))
    halves = everybody.Split(everybody.rank % 2, everybody.rank)
    with world_and_agent(halves) as (world, _):
        time.sleep(0.1 * (everybody.rank % 2))  # each half in its own time
        assert world.comm.allgather(everybody.rank) == list(
            range(everybody.rank % 2, everybody.size, 2)
        )
    with world_and_agent(MPI.COMM_SELF) as (world, agent):
        assert (world.rank, world.size, world.node_of) == (0, 1, (0,))
        time.sleep(0.05 * everybody.rank)
        with group_of(world, agent, 1, (0,), None) as group:
            assert group.comm.allgather("alone") == ["alone"]
        assert world.on_root(lambda: 7) == 7
        world.mailbox.post("to myself", 0, Tag.ORDER)
        while (mail := world.mailbox.take(Tag.ORDER)) is None:
            pass
        assert mail == (0, "to myself")
    backwards.Free()
    halves.Free()


def nodes() -> None:
    rank, host = MPI.COMM_WORLD.rank, MPI.Get_processor_name()
    assert MPI.COMM_WORLD.size == 4
    names = ("south", "north", "south", "east")
    of_slurm = ("n1", "n2", "n1", "n3")
    with world_and_agent() as (world, _):
        assert world.node_of == (0, 0, 0, 0)
    # Slurm's name for them, where several nodes are one host: each has a daemon there.
    assert node_names(slurm=of_slurm[rank]) == of_slurm
    # mpiexec hands on what the first node's shell has, or nothing.
    assert node_names(slurm="n1") == (host,) * 4
    assert node_names(slurm="n1" if rank < 2 else None) == (host,) * 4
    assert node_names(chosen=names[rank], slurm=of_slurm[rank]) == names
    with world_and_agent() as (world, _):
        assert world.node_of == (0, 1, 0, 2)


def node_names(*, chosen: str | None = None, slurm: str | None = None) -> tuple[str, ...]:
    for variable, value in ((NODE_NAME_VARIABLE, chosen), ("SLURMD_NODENAME", slurm)):
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value
    with world_and_agent() as (world, _):
        return world.node_names
