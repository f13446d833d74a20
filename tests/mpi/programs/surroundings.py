"""What the programs share: a world with its agent, groups in it, and the facts of a process."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mpi4py import MPI

from mpihpo.comm.group import Group
from mpihpo.comm.world import World
from mpihpo.runner.agent import Agent
from mpihpo.runner.state import Keeper


@contextmanager
def world_and_agent(comm: MPI.Intracomm = MPI.COMM_WORLD) -> Iterator[tuple[World, Agent]]:
    """A world as a job has it. After an error it is not closed: closing waits for all ranks."""
    world = World(comm)
    with Agent(world, Keeper(), heartbeat_seconds=60.0) as agent:
        world.serve = agent.serve
        yield world, agent
    world.close()


@contextmanager
def group_of(
    world: World, agent: Agent, serial: int, ranks: tuple[int, ...], backend: str | None = "gloo"
) -> Iterator[Group]:
    """A group from building to freeing; for its members."""
    group = Group(world, serial, ranks, backend)
    agent.watch(group)
    group.build()
    yield group
    group.free()
    agent.watch(None)


def assert_nothing_left(world: World, excepthook: object) -> None:
    """Neither the registry, torch nor the interpreter still knows of a group."""
    import torch.distributed as dist

    known = dist.distributed_c10d._world
    assert world.registry.live == []
    assert not dist.is_initialized()
    assert not known.pg_map
    assert not known.pg_names
    assert not known.pg_group_ranks
    assert sys.excepthook is excepthook


def error_from(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    function: Callable[..., object],
    *arguments: object,
) -> str:
    """What the error says that ``function`` must raise."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind}")


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def threads() -> int:
    """Threads of the process, those of C++ included where the system tells."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def resident_bytes() -> int:
    """Memory of the process; 0 where the system does not tell."""
    gc.collect()
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * 4096 if file.exists() else 0


def settles(function: Callable[[], int], at_most: int, seconds: float = 5.0) -> int:
    """What ``function`` gives as soon as it is no more than ``at_most``, or when time is over."""
    end = time.monotonic() + seconds
    while (value := function()) > at_most and time.monotonic() < end:
        time.sleep(0.02)
    return value
