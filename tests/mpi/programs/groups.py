"""Groups with torch's default process group in them."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpihpo.comm.group import Group
from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import CommError
from tests.mpi.programs.surroundings import (
    assert_nothing_left,
    descriptors,
    error_from,
    group_of,
    resident_bytes,
    settles,
    threads,
    world_and_agent,
)


def every_size() -> None:
    """Groups of 1, 2, ... all ranks, each in order, reversed and as a rotation."""
    excepthook = sys.excepthook
    with world_and_agent() as (world, agent):
        serial = 0
        for size in range(1, world.size + 1):
            for order in ("ascending", "descending", "rotated"):
                serial += 1
                ranks = tuple((serial + k) % world.size for k in range(size))
                if order != "rotated":
                    ranks = tuple(sorted(ranks, reverse=order == "descending"))
                if world.rank in ranks:
                    with group_of(world, agent, serial, ranks) as group:
                        assert (group.rank, group.size) == (ranks.index(world.rank), len(ranks))
                        assert group.comm.Get_size() == len(ranks)
                        assert group.comm.allgather(world.rank) == list(ranks)
                        check_default_group(world.rank, ranks)
                assert_nothing_left(world, excepthook)


def check_default_group(me: int, ranks: tuple[int, ...]) -> None:
    size, rank = len(ranks), ranks.index(me)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "gloo")

    total = torch.tensor([float(me + 1)])
    dist.all_reduce(total)
    assert total.item() == sum(ranks) + size

    gathered = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(gathered, torch.tensor([me]))
    assert [int(each) for each in gathered] == list(ranks)

    for root in range(size):
        value = torch.tensor([me])
        dist.broadcast(value, root)
        assert value.item() == ranks[root]

    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": each} for each in ranks]
    dist.barrier()


def distributed_training() -> None:
    """DDP averages gradients over the group's ranks only; a user's own groups work inside."""
    excepthook = sys.excepthook
    with world_and_agent() as (world, agent):
        assert world.size == 4
        ranks = (3, 1, 2)
        if world.rank in ranks:
            with group_of(world, agent, 1, ranks):
                model = torch.nn.Linear(2, 1, bias=False)
                ddp = DistributedDataParallel(model)
                same = [torch.zeros_like(model.weight) for _ in ranks]
                dist.all_gather(same, model.weight.detach())
                assert all(torch.equal(each, same[0]) for each in same)
                ddp(torch.full((1, 2), float(world.rank))).sum().backward()
                assert torch.allclose(model.weight.grad, torch.full((1, 2), 2.0))

                pair = dist.new_group([0, 2])
                value = torch.tensor([world.rank])
                if dist.get_rank() != 1:
                    dist.all_reduce(value, group=pair)
                    assert value.item() == 3 + 2
                each_own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
                assert dist.get_world_size(each_own) == 1
                everybody = dist.new_group()
                dist.all_reduce(value := torch.ones(1), group=everybody)
                assert value.item() == 3
                del ddp, pair, each_own, everybody
        assert_nothing_left(world, excepthook)


def same_and_changing_ranks() -> None:
    """The same ranks again and again, and ranks that sit out some groups."""
    excepthook = sys.excepthook
    rungs = [(0, 1, 2), (0, 1, 2), (2, 1, 0), (0, 1), (0, 1, 2), (1, 2), (0, 3), (0, 1, 2, 3)]
    with world_and_agent() as (world, agent):
        for serial, ranks in enumerate(rungs, start=10):
            if world.rank in ranks:
                with group_of(world, agent, serial, ranks):
                    check_default_group(world.rank, ranks)
        assert_nothing_left(world, excepthook)


def a_running_group_never_waits() -> None:
    """While two ranks are in a group, two others build, use and free group after group."""
    with world_and_agent() as (world, agent):
        assert world.size == 4
        world.comm.Barrier()
        if world.rank < 2:
            with group_of(world, agent, 1, (0, 1)):
                done = wait_until(
                    lambda: world.mailbox.take(Tag.MEMBER) is not None, timeout_seconds=60
                )
                assert done, "the others wait for a group that they are no members of"
        else:
            for serial in range(2, 10):
                with group_of(world, agent, serial, (2, 3)) as group:
                    dist.all_reduce(torch.ones(1))
                    group.comm.Barrier()
            world.mailbox.post("done", world.rank - 2, Tag.MEMBER)


def quick_members() -> None:
    """A member that is done at once must not take the connections from those that are not."""
    with world_and_agent() as (world, agent):
        everybody = tuple(range(world.size))
        for serial in range(20):
            if world.rank == serial % world.size:
                time.sleep(0.01)
            with group_of(world, agent, serial, everybody):
                pass  # a slow member may still be building
        value = torch.full((1 << 20,), float(world.rank))
        for serial in range(20, 24):
            with group_of(world, agent, serial, everybody):
                if world.rank != 0:
                    time.sleep(0.05 * world.rank)
                dist.broadcast(value, 0)  # the root is done before the others are
            assert value[-1].item() == 0


def serials_beyond_the_largest_tag() -> None:
    """Serials grow for ever, MPI's tags do not."""
    with world_and_agent() as (world, agent):
        for serial in (world.tag_limit - 1, world.tag_limit, world.tag_limit + 1, 2**40):
            ranks = tuple(range(world.size))
            with group_of(world, agent, serial, ranks):
                check_default_group(world.rank, ranks)


def many_communicators() -> None:
    """More groups in one job than MPI has room for at a time."""
    with world_and_agent() as (world, agent):
        for serial in range(2500):
            with group_of(world, agent, serial, (0, 1), None) as group:
                if serial % 100 == 0:
                    assert group.comm.allgather(world.rank) == [0, 1]
            if serial == 500:
                before = (descriptors(), threads(), resident_bytes())
        assert world.registry.total == 2500
        assert world.registry.live == []
        assert descriptors() <= before[0]
        assert threads() <= before[1]
        grown = resident_bytes() - before[2]
        assert grown < 8e6, f"{grown / 1e6:.1f} MB in 2,000 groups"


def many_process_groups() -> None:
    """What a build leaves behind would add up: 150 groups with a model in each."""
    excepthook = sys.excepthook
    warm = 30
    with world_and_agent() as (world, agent):
        for serial in range(150):
            with group_of(world, agent, serial, (0, 1)):
                value = torch.ones(1)
                dist.all_reduce(value)
                assert value.item() == 2
                if serial % 10 == 0:
                    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
                    ddp(torch.ones(1, 4)).sum().backward()
                    del ddp
            assert sys.excepthook is excepthook
            if serial == warm:
                before = (descriptors(), threads(), resident_bytes())
        assert world.registry.total == 2 * 150
        assert_nothing_left(world, excepthook)
        assert settles(descriptors, before[0]) <= before[0]
        assert settles(threads, before[1]) <= before[1]
        grown = resident_bytes() - before[2]
        assert grown < 25e6, f"{grown / 1e6:.1f} MB in {150 - warm} process groups"


def one_rank_groups() -> None:
    """They make no communicator unless asked, and a process group that sends nothing."""
    with world_and_agent() as (world, agent):
        for serial in range(50):
            with group_of(world, agent, serial, (world.rank,)):
                assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
                dist.barrier()
                assert world.registry.live == [f"process group {serial}"]
        assert (world.registry.total, world.registry.live) == (50, [])
        with group_of(world, agent, 50, (world.rank,)) as group:
            assert group.comm.allgather(world.rank) == [world.rank]
            assert world.registry.live == ["communicator 50", "process group 50"]
        assert world.mailbox.take(Tag.STORE) is None
        assert world.registry.live == []


def a_group_of_the_embedding_program() -> None:
    """torch has a default group already: refused in words, and that group is left alone."""
    with world_and_agent() as (world, _):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = Group(world, 1, tuple(range(world.size)), "gloo")
        assert "already has a default process group" in error_from(CommError, group.build)
        group.abort()
        assert dist.is_initialized(), "the embedding program's group was destroyed"
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()


def tags_of_groups_and_of_messages() -> None:
    """Groups whose serials are the mailbox's tags, while both ranks read mail of every tag."""
    with world_and_agent() as (world, _):
        for serial in range(1, 200):
            # MPI reduces a tag to its range, so that serials 1 to 8 are the mailbox's tags.
            group = Group(world, serial % len(Tag) + 1, tuple(range(world.size)), None)
            deadline = time.monotonic() + (0.002 if world.rank == 0 else 0.0)
            while time.monotonic() < deadline:  # the other rank is in Create_group already
                for tag in Tag:
                    assert world.mailbox.take(tag) is None, (tag, serial)
            group.build()
            group.free()
