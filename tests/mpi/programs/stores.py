"""The store over MPI by itself, on four ranks."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mpihpo.comm.process_group import DefaultGroup
from mpihpo.comm.store import MpiStore
from mpihpo.comm.world import World
from mpihpo.errors import CommError
from tests.mpi.programs.surroundings import error_from, world_and_agent


def make(world: World, serial: int, seconds: float = 20.0) -> MpiStore:
    everybody = tuple(range(world.size))
    return MpiStore(world.store_mail, serial, everybody, world.rank, seconds, world.serve)


def keys_and_values() -> None:
    with world_and_agent() as (world, _):
        store = make(world, 1)
        store.set(f"from {world.rank}", bytes([0, world.rank, 255]))
        store.set("text", "the same everywhere")
        for rank in range(world.size):
            assert bytes(store.get(f"from {rank}")) == bytes([0, rank, 255])
        assert store.get("text") == b"the same everywhere"
        store.wait([f"from {rank}" for rank in range(world.size)])
        assert store.check(["text", "from 0"])
        assert not store.check(["text", "nobody sets this"])
        assert store.num_keys() == world.size + 1

        if world.rank == 2:
            time.sleep(0.5)
            store.set("late", b"")
        assert store.get("late") == b""  # waits

        world.comm.Barrier()
        if world.rank == 1:
            store.set("text", b"newer")
            store.set("text is newer", b"")
        store.wait(["text is newer"])
        assert store.get("text") == b"newer"

        world.comm.Barrier()
        if world.rank == 3:
            assert store.delete_key("late")
            assert not store.delete_key("late")
            store.set("late is gone", b"")
        store.wait(["late is gone"])
        assert not store.check(["late"])
        world.comm.Barrier()
        world.store_mail.close()


def a_missing_key_is_named() -> None:
    with world_and_agent() as (world, _):
        store = make(world, 1, seconds=0.3)
        store.set("there", b"1")
        began = time.monotonic()
        assert "'absent'" in error_from(RuntimeError, store.get, "absent")
        text = error_from(RuntimeError, store.wait, ["there", "lost"], timedelta(seconds=0.2))
        assert "'lost'" in text
        assert "'there'" not in text
        store.set_timeout(timedelta(seconds=0.1))
        assert store.timeout == timedelta(seconds=0.1)
        assert "'absent'" in error_from(RuntimeError, store.get, "absent")
        assert 0.5 < time.monotonic() - began < 10
        world.comm.Barrier()
        world.store_mail.close()


def counters_are_atomic() -> None:
    with world_and_agent() as (world, _):
        store = make(world, 1)
        mine = [store.add("counter", 1) for _ in range(50)]
        assert mine == sorted(mine)
        everybody = [value for values in world.comm.allgather(mine) for value in values]
        assert sorted(everybody) == list(range(1, 50 * world.size + 1))
        assert store.add("counter", 0) == 50 * world.size
        assert int(store.get("counter")) == 50 * world.size

        won = store.compare_set("lock", b"", str(world.rank).encode())
        winners = world.comm.allgather(bytes(won))
        assert len(set(winners)) == 1, f"several ranks took the lock: {winners}"
        world.comm.Barrier()
        world.store_mail.close()


def answers_as_torch_does() -> None:
    """The same calls on torch's own store give the same answers."""
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("set", ("a", b"1")),
        ("get", ("a",)),
        ("add", ("a", 5)),
        ("get", ("a",)),
        ("add", ("new", -2)),
        ("num_keys", ()),
        ("compare_set", ("a", b"6", b"7")),
        ("compare_set", ("a", b"6", b"8")),
        ("compare_set", ("unset", b"", b"first")),
        ("compare_set", ("unset", b"other", b"second")),
        ("compare_set", ("never", b"something", b"else")),
        ("check", (["never"],)),
        ("check", (["a", "unset"],)),
        ("delete_key", ("a",)),
        ("delete_key", ("a",)),
        ("check", (["a"],)),
        ("num_keys", ()),
    ]

    with world_and_agent() as (world, _):
        if world.rank == 1:  # not the rank that keeps the counters
            ours = MpiStore(world.store_mail, 1, (2, 1), 1, 20.0, world.serve)
            theirs = [_as_bytes(each) for each in answers_of(dist.HashStore(), calls)]
            assert [_as_bytes(each) for each in answers_of(ours, calls)] == theirs
        elif world.rank == 2:
            MpiStore(world.store_mail, 1, (2, 1), 0, 20.0, world.serve)
        world.comm.Barrier()
        world.store_mail.close()


def answers_of(store: Any, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    return [getattr(store, name)(*arguments) for name, arguments in calls]


def _as_bytes(answer: Any) -> Any:
    return answer.encode() if isinstance(answer, str) else answer


def early_and_late_messages() -> None:
    """A quick rank's keys wait for the slow ones; those of a group that is gone are dropped."""
    with world_and_agent() as (world, agent):
        store = make(world, 1)
        store.set("who", b"first")
        if world.rank == 0:
            world.store_mail.close()
            store = make(world, 2)
            store.set("who", b"second")
            store.set("early", b"")
        world.comm.Barrier()
        agent.poll()
        if world.rank != 0:
            assert store.get("who") == b"first"
            assert not store.check(["early"])
        world.comm.Barrier()
        if world.rank != 0:
            if world.rank == 1:
                store.set("too late", b"")
            world.store_mail.close()
            store = make(world, 2)
        assert store.get("who") == b"second"
        assert store.get("early") == b""
        world.comm.Barrier()
        time.sleep(0.1)
        assert not store.check(["too late"])
        world.comm.Barrier()
        world.store_mail.close()


def a_member_that_never_comes() -> None:
    """Building ends with an error that tells whose key is missing."""
    with world_and_agent() as (world, _):
        if world.rank < 2:
            group = DefaultGroup(
                world.store_mail,
                1,
                (0, 1, 2),
                world.rank,
                backend="gloo",
                timeout_seconds=1.5,
                check=world.serve,
            )
            text = error_from(CommError, group.build)
            assert "ranks (0, 1, 2)" in text
            assert "/2'] not set in 2 s" in text, text
            group.abort()
            assert not dist.is_initialized()
        world.comm.Barrier()
