"""Ranks that die while the others live on, and ranks that live but are set aside."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpihpo.comm.group import Group
from mpihpo.comm.mailbox import FIRST_CHANNEL, Tag
from mpihpo.comm.meeting import Terms
from mpihpo.comm.waiting import wait_until
from mpihpo.comm.world import World
from mpihpo.errors import CommError, GroupAborted, LossElsewhere
from mpihpo.runner.agent import Agent
from mpihpo.runner.state import Keeper
from tests.mpi.programs.groups import check_default_group
from tests.mpi.programs.surroundings import (
    assert_nothing_left,
    error_from,
    group_of,
    world_and_agent,
)

AT_MOST_SECONDS = 20.0
"""From a death to what must follow; it takes a fraction of a second."""
LARGE = 5_000_000


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def end() -> NoReturn:
    """The end of a process after a death: MPI_Finalize may wait for the dead rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def known(answer: str) -> None:
    """Whether deaths are survived is known before there are any."""
    world = World(MPI.COMM_WORLD)
    assert world.survives_deaths == (answer == "yes"), MPI.Get_library_version()
    assert world.dead == frozenset()
    world.close()
    assert world.may_finalize


def until(condition: Callable[[], bool], what: str) -> None:
    assert wait_until(condition, timeout_seconds=AT_MOST_SECONDS), what


def until_known(world: World, *dead: int) -> None:
    """A group whose members do not all know yet of a death may be lost to it."""
    until(lambda: world.dead.issuperset(dead), f"rank {world.rank} knows of {set(world.dead)}")


def mail() -> None:
    """What the dead rank sent before is read, what it is sent is dropped, and all else goes on."""
    world = World(MPI.COMM_WORLD)
    assert world.size == 4
    victim, others = 2, (0, 1, 3)
    if world.rank == victim:
        for other in others:
            world.mailbox.post("last words", other, Tag.ORDER)
            world.mailbox.post(bytes(LARGE), other, Tag.STORE)
            world.mailbox.post_bytes(bytearray(LARGE), other, FIRST_CHANNEL)
        until(lambda: world.mailbox.take(Tag.EVENT) is not None, "no word from rank 0")
        die()
    buffer = bytearray(LARGE)
    world.mailbox.post_bytes(buffer, victim, FIRST_CHANNEL + 1)
    for _ in range(100):
        world.mailbox.post("never read", victim, Tag.MEMBER)
    if world.rank == 0:
        world.mailbox.post("now", victim, Tag.EVENT)

    faults: list[BaseException] = []
    is_over = threading.Event()

    def read(tag: int) -> None:
        try:
            while not is_over.is_set():
                world.mailbox.take(tag)
                time.sleep(0.001)
        except BaseException as fault:
            faults.append(fault)

    readers = [threading.Thread(target=read, args=(tag,)) for tag in (Tag.ALERT, Tag.MEMBER)]
    for reader in readers:
        reader.start()
    until(lambda: world.dead == {victim}, f"rank {world.rank} knows of {set(world.dead)}")
    until(world.mailbox.flushed, "messages to the dead rank stay")
    world.mailbox.post("to nobody", victim, Tag.ORDER)
    world.mailbox.post_bytes(buffer, victim, FIRST_CHANNEL)
    assert world.mailbox.flushed()
    assert world.mailbox.take(Tag.ORDER) == (victim, "last words")
    assert "rank 2 died" in error_from(
        LossElsewhere, world.mailbox.receive_bytes, buffer, victim, FIRST_CHANNEL
    )
    assert world.mailbox.take(Tag.STORE) is None

    for other in others:
        world.mailbox.post(("hello", bytes(LARGE)), other, Tag.EPOCH)
    heard: set[int] = set()

    def hear() -> bool:
        if (each := world.mailbox.take(Tag.EPOCH)) is not None:
            heard.add(each[0])
        return heard == set(others)

    until(hear, f"heard of {heard} only")
    is_over.set()
    for reader in readers:
        reader.join()
    assert faults == []
    for other in others:  # read by nobody: closing does
        world.mailbox.post(bytes(LARGE), other, Tag.EVENT)
    world.close()
    world.close()


def in_python(group: Group) -> None:
    while True:
        group.check()
        time.sleep(0.01)


WAITS: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(8)),
    "Allreduce": lambda group: group.comm.Allreduce(np.ones(8), np.ones(8)),
    "python": in_python,
}
BESIDE = "beside"


def groups() -> None:
    """Deaths one after the other, in groups and beside them: groups of the others go on."""
    excepthook = sys.excepthook
    with world_and_agent() as (world, agent):
        serial = 0
        for victim, wait in zip((5, 4, 3, 2), (*WAITS, BESIDE), strict=True):
            alive = tuple(range(victim))
            serial += 1
            if wait == BESIDE:
                go_on_beside(world, agent, serial, alive, victim)
            else:
                seconds = released(world, agent, serial, (*alive, victim), victim, WAITS[wait])
                assert seconds < AT_MOST_SECONDS, wait
                if world.rank == 0:
                    sys.stdout.write(f"{wait}: released after {seconds:.2f} s\n")
            assert_nothing_left(world, excepthook)
            # Rank 0 knows of the death; the others build what it orders whether they do or not.
            for ranks in (alive, alive[::-1], alive[-1:], alive[:2]):
                serial += 1
                if world.rank == 0:
                    until(lambda dead=victim: dead in world.dead, "rank 0 knows nothing")
                    for rank in ranks:
                        world.mailbox.post(serial, rank, Tag.ORDER)
                if world.rank in ranks:
                    until(lambda: world.mailbox.take(Tag.ORDER) is not None, "no order")
                    with group_of(world, agent, serial, ranks) as group:
                        assert group.comm.allgather(world.rank) == list(ranks)
                        check_default_group(world.rank, ranks)
        assert world.dead == {2, 3, 4, 5}
        assert world.survivors().allgather(world.rank) == [0, 1]
        assert_nothing_left(world, excepthook)


def released(
    world: World,
    agent: Agent,
    serial: int,
    members: tuple[int, ...],
    victim: int,
    wait: Callable[[Group], Any],
) -> float:
    """Seconds from the death of a member to this rank's being free again."""
    group = Group(world, serial, members, "gloo")
    agent.watch(group)
    group.build()
    died_at = group.comm.bcast(time.time() + 0.3, 0)
    if world.rank == victim:
        time.sleep(max(0.0, died_at - time.time()))
        die()
    text = error_from((RuntimeError, GroupAborted), wait, group)  # MPI.Exception is the first
    assert text
    group.abort()
    agent.watch(None)
    return time.time() - died_at


def go_on_beside(
    world: World, agent: Agent, serial: int, members: tuple[int, ...], victim: int
) -> None:
    """A rank outside a group dies: its members notice nothing."""
    if world.rank == victim:
        until(lambda: world.mailbox.take(Tag.EVENT) is not None, "no word from the group")
        die()
    with group_of(world, agent, serial, members) as group:
        group.comm.Barrier()  # all have built it
        if group.rank == 0:
            world.mailbox.post("now", victim, Tag.EVENT)
        until_known(world, victim)
        check_default_group(world.rank, members)
        assert group.comm.allgather(world.rank) == list(members)
        group.check()


def building(when: str) -> None:
    """A member that dies before, or while, the communicator is made releases the others."""
    excepthook = sys.excepthook
    with world_and_agent() as (world, agent):
        victim = world.size - 1
        members = tuple(range(world.size))
        if world.rank == victim:
            if when == "inside":  # the others hold it for one that enters with them
                world.parent._meetings.meet(
                    "group", 1, lambda: Terms(0, members), timeout_seconds=AT_MOST_SECONDS
                )
            elif when == "half-way":
                Group(world, 1, members, "gloo")._make_comm()
            time.sleep(0.3)
            die()
        group = Group(world, 1, members, "gloo")
        agent.watch(group)
        began = time.monotonic()
        error_from((LossElsewhere, GroupAborted), group.build)
        assert time.monotonic() - began < AT_MOST_SECONDS
        group.abort()
        agent.watch(None)
        assert_nothing_left(world, excepthook)
        until_known(world, victim)
        with group_of(world, agent, 2, members[:-1]) as group:
            check_default_group(world.rank, members[:-1])


def building_beside_a_death() -> None:
    """A rank beside the group dies while some members are in MPI and another is not yet."""
    with world_and_agent() as (world, agent):
        *members, victim = range(world.size)
        if world.rank == victim:
            until(lambda: world.mailbox.take(Tag.EVENT) is not None, "no word from the group")
            die()
        parent = world.parent
        make = parent._make

        def late(*arguments: Any) -> Any:
            world.mailbox.post("now", victim, Tag.EVENT)
            until_known(world, victim)  # by then the others are inside, and cannot get out
            return make(*arguments)

        group = Group(world, 1, tuple(members), "gloo")
        agent.watch(group)
        if world.rank == members[-1]:
            parent._make = late
        error_from(LossElsewhere, group.build)
        parent._make = make
        group.abort()
        until_known(world, victim)
        with group_of(world, agent, 2, tuple(members)):
            check_default_group(world.rank, tuple(members))


def rank_0_dies() -> None:
    """The survivors make a world of their own; who comes too late is waited for no longer."""
    with world_and_agent() as (world, _):
        assert world.size == 4
        world.comm.Barrier()
        if world.rank == 0:
            die()
        until_known(world, 0)
        if world.rank == 3:
            time.sleep(2)
        text = error_from(CommError, world.survivors, (), 1.0)
        assert "in 1 s" in text
        comm = world.survivors((), AT_MOST_SECONDS)
        assert comm.allgather(world.rank) == [1, 2, 3]
        world.leave()
        with world_and_agent(comm) as (smaller, its_agent):
            assert smaller.survives_deaths
            assert (smaller.rank, smaller.size) == (world.rank - 1, 3)
            assert smaller.on_root(lambda: world.rank) == 1
            with group_of(smaller, its_agent, 1, (2, 0, 1)):
                check_default_group(smaller.rank, (2, 0, 1))
            if smaller.rank == 2:
                die()
            until_known(smaller, 2)
            with group_of(smaller, its_agent, 2, (0, 1)):
                check_default_group(smaller.rank, (0, 1))


def dies_while_closing() -> None:
    world = World(MPI.COMM_WORLD)
    if world.rank == 1:
        time.sleep(0.3)
        die()
    world.close()
    assert world.dead == {1}
    assert not world.may_finalize


def set_aside(kind: str) -> None:
    """A rank lives but comes to nothing any more: the others end without it."""
    everybody = MPI.COMM_WORLD
    world = World(everybody)
    assert world.size == 4
    stuck, victims = 1, {2} if kind == "after a death" else set()
    others = tuple(rank for rank in range(4) if rank not in {stuck, *victims})
    world.comm.Barrier()
    if world.rank in victims:
        die()
    with Agent(world, Keeper(), heartbeat_seconds=60.0) as agent:
        world.serve = agent.serve
        if world.rank == stuck:
            wait_until(lambda: everybody.Iprobe(0))
            everybody.recv(source=0)
        else:
            until_known(world, *victims)
            end_without(world, agent, stuck, others)
    if world.rank == stuck:
        world.leave()
    else:
        group = Group(world, 2, others, None)
        group.build()
        group.abort()
        world.set_aside({stuck})
        assert world.close()
        assert world.registry.live == []
        assert world.dead == victims
        assert not world.may_finalize
    if world.rank == 0:
        everybody.send("go on", stuck)


def end_without(world: World, agent: Agent, stuck: int, others: tuple[int, ...]) -> None:
    world.mailbox.post(bytes(LARGE), stuck, Tag.ORDER)
    for rank in others:
        world.mailbox.post(bytes(LARGE), rank, Tag.MEMBER)
    with group_of(world, agent, 1, others):
        check_default_group(world.rank, others)
    comm = world.survivors({stuck})
    assert comm.allgather(world.rank) == list(others)
    assert comm.bcast("results" if world.rank == 0 else None) == "results"


def nobody_comes() -> None:
    """A rank that is waited for and does not come is named."""
    world = World(MPI.COMM_WORLD)
    if world.rank == 0:
        assert "[1] did not come in 1 s" in error_from(CommError, world.survivors, (), 1.0)
        MPI.COMM_WORLD.send("go on", 1)
    else:
        MPI.COMM_WORLD.recv(source=0)
    world.leave()
