"""A member fails while the others wait for it: they must fall out, and be good for the next."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpihpo.comm import sockets
from mpihpo.comm.group import Group
from mpihpo.comm.mailbox import Tag
from mpihpo.comm.world import World
from mpihpo.errors import CommError, GroupAborted
from mpihpo.records import Failure
from mpihpo.runner.agent import Agent
from mpihpo.runner.orders import Abort
from tests.mpi.programs.surroundings import (
    assert_nothing_left,
    descriptors,
    group_of,
    settles,
    threads,
    world_and_agent,
)

AT_MOST_SECONDS = 20.0
"""From a failure to the release of the last member; it takes a fraction of a second."""


def backward(group: Group) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(600, 600))
    loss = ddp(torch.ones(1, 600)).sum()
    group.comm.Barrier()  # the member that fails comes so far
    if group.rank == 1:
        raise ValueError("a failure between forward and backward")
    loss.backward()


def monitored(group: Group) -> None:
    dist.monitored_barrier()


WAITS: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(8)),
    "large all_reduce": lambda group: dist.all_reduce(torch.ones(1 << 20)),
    "work.wait": lambda group: dist.all_reduce(torch.ones(8), async_op=True).wait(),
    "barrier": lambda group: dist.barrier(),
    "broadcast": lambda group: dist.broadcast(torch.ones(8), 1),
    "all_gather_object": lambda group: dist.all_gather_object([None] * group.size, "x"),
    "recv": lambda group: dist.recv(torch.ones(8), 1),
    "new_group": lambda group: dist.new_group([0, 1, 2]),
    "backward": backward,
    "Allreduce": lambda group: group.comm.Allreduce(np.ones(8), np.ones(8)),
    "Barrier": lambda group: group.comm.Barrier(),
    "mpi recv": lambda group: group.comm.recv(source=1),
    "mpi bcast": lambda group: group.comm.bcast(None, 1),
    "store": lambda group: dist.distributed_c10d._get_default_store().get("never set"),
    "python": lambda group: [time.sleep(0.05) or group.check() for _ in range(1000)],
}


def every_kind_of_wait() -> None:
    excepthook = sys.excepthook
    slowest: dict[str, float] = {}
    with world_and_agent() as (world, agent):
        assert world.size == 3
        serial = 0
        before = (0, 0)
        for name, wait in WAITS.items():
            serial += 1
            seconds = released_from(world, agent, serial, wait)
            slowest[name] = max(world.comm.allgather(seconds))
            assert slowest[name] < AT_MOST_SECONDS, f"{name}: {slowest[name]:.1f} s"
            assert_nothing_left(world, excepthook)
            serial += 1
            with group_of(world, agent, serial, (2, 0, 1)) as group:
                dist.all_reduce(total := torch.tensor([float(world.rank)]))
                assert total.item() == 3
                assert group.comm.allgather(world.rank) == [2, 0, 1]
            if name == "backward":
                before = (descriptors(), threads())
        assert settles(descriptors, before[0]) <= before[0]
        assert settles(threads, before[1]) <= before[1]
        if world.rank == 0:
            shown = ", ".join(f"{name} {value:.2f}" for name, value in slowest.items())
            sys.stdout.write(f"seconds until all were released: {shown}\n")


def released_from(world: World, agent: Agent, serial: int, wait: Callable[[Group], Any]) -> float:
    """Seconds from the failure of group rank 1 to this rank's being free again."""
    ranks = (2, 1, 0)
    group = Group(world, serial, ranks, "gloo")
    agent.watch(group)
    group.build()
    failed_at = 0.0
    try:
        if group.rank == 1 and wait is not backward:
            time.sleep(0.3)  # the others are waiting by now
            raise ValueError("a failure")
        wait(group)
    except ValueError as error:
        assert group.rank == 1
        failed_at = time.time()
        tell(world, group, error)
    except (RuntimeError, GroupAborted):
        assert group.rank != 1
    else:
        raise AssertionError("the wait ended although a member had failed")
    group.abort()
    free_at = time.time()
    agent.watch(None)
    return free_at - max(world.comm.allgather(failed_at))


def tell(world: World, group: Group, error: Exception) -> None:
    failure = Failure(rank=world.rank, kind=type(error).__name__, message=str(error))
    for member in group.ranks:
        if member != world.rank:
            world.mailbox.post(Abort(group.serial, failure), member, Tag.ALERT)


def while_building() -> None:
    """A member that fails between communicator and process group releases those that build it."""
    with world_and_agent() as (world, agent):
        group = Group(world, 1, (0, 1, 2), "gloo")
        agent.watch(group)
        began = time.monotonic()
        try:
            if world.rank == 1:
                group._make_comm()
                time.sleep(0.3)
                raise ValueError("a failure")
            group.build()
        except ValueError as error:
            tell(world, group, error)
        except (GroupAborted, CommError):
            pass
        else:
            raise AssertionError("a group was built although a member had failed")
        group.abort()
        agent.watch(None)
        assert time.monotonic() - began < AT_MOST_SECONDS
        assert not dist.is_initialized()
        world.comm.Barrier()
        with group_of(world, agent, 2, (0, 1, 2)):
            dist.all_reduce(torch.ones(1))


def a_word_that_comes_early() -> None:
    """The failure is known before this rank has begun to build that group."""
    with world_and_agent() as (world, agent):
        group = Group(world, 7, (0, 1, 2), "gloo")
        if world.rank == 1:
            tell(world, group, ValueError("a failure"))
        world.comm.Barrier()
        time.sleep(0.1)
        if world.rank == 0:
            agent.watch(Group(world, 6, (0,), "gloo"))  # an older group is not concerned
            assert agent.cause is None
            agent.watch(group)
            assert agent.cause is not None
            assert agent.cause.message == "a failure"
            assert group.is_aborted
            agent.watch(Group(world, 8, (0,), "gloo"))
            assert agent.cause is None
        world.comm.Barrier()
        agent.watch(None)


def other_connections_stay() -> None:
    """Those of MPI and of the training function, opened before, while and after it was built."""
    with world_and_agent() as (world, agent):
        ours = [connected_pair()]
        strangers = {number: _ends(number) for number in sockets.open_sockets()}
        for serial, is_failing in ((1, False), (2, True)):
            group = Group(world, serial, (0, 1, 2), "gloo")
            agent.watch(group)
            group.build()
            ours.append(connected_pair())
            dist.all_reduce(torch.ones(1))
            world.comm.Barrier()
            if is_failing:
                group.abort()
            else:
                group.free()
            agent.watch(None)
        for left, right in ours:
            left.sendall(b"still here")
            assert right.recv(20) == b"still here"
        for number, ends in strangers.items():
            assert _ends(number) == ends, f"descriptor {number}: {ends}"
        assert world.comm.allgather(world.rank) == [0, 1, 2]
        for pair in ours:
            for each in pair:
                each.close()


def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def _ends(number: int) -> tuple[str, str]:
    """Both ends of a connection; of one that was shut down the second is missing."""
    with socket.socket(fileno=os.dup(number)) as connection:
        try:
            return str(connection.getsockname()), str(connection.getpeername())
        except OSError as error:
            return str(connection.getsockname()), str(error)
