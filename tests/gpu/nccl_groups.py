"""NCCL groups of one rank: many built and destroyed, one aborted. Run on one rank by check_gpu.py.

The runtime makes no process group for one rank; here the process group is made by hand.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpihpo.comm.devices import choose_device
from mpihpo.comm.process_group import (
    DefaultGroup,
    look_around,
    nccl_environment,
    take_device,
    warm_up,
)
from mpihpo.comm.world import World

GROUPS = 50
SETTLED = 5
"""Groups after which memory and threads must not grow."""
MIB = 1 << 20


def main() -> None:
    environment = dict(os.environ)
    excepthook = sys.excepthook
    with World(MPI.COMM_WORLD) as world:
        device = take_device(choose_device("nccl", look_around(local_rank=0, ranks_on_node=1)))
        warm_up(device)
        with nccl_environment("nccl"):
            build_and_destroy(world, device)
            abort_one(world, device)
    assert dict(os.environ) == environment, "the environment was left changed"
    assert sys.excepthook is excepthook, "sys.excepthook was left wrapped"


def build_and_destroy(world: World, device: torch.device) -> None:
    builds, destroys, used, threads = [], [], [], []
    before = used_bytes(device)
    for serial in range(GROUPS):
        began = time.perf_counter()
        group = make(world, serial)
        builds.append(time.perf_counter() - began)
        if serial == 0:
            all_reduce(device)
            figure("nccl_group_memory", (used_bytes(device) - before) / MIB, "MiB")
        all_reduce(device)
        began = time.perf_counter()
        group.destroy()
        destroys.append(time.perf_counter() - began)
        assert not dist.is_initialized()
        used.append(used_bytes(device))
        threads.append(thread_count())
    figure("nccl_first_build", builds[0] * 1e3, "ms")
    figure("nccl_build_median", statistics.median(builds[1:]) * 1e3, "ms")
    figure("nccl_build_longest", max(builds[1:]) * 1e3, "ms")
    figure("nccl_destroy_median", statistics.median(destroys) * 1e3, "ms")
    growth = (used[-1] - used[SETTLED]) / MIB
    figure("nccl_memory_growth", growth, "MiB")
    figure("nccl_thread_growth", threads[-1] - threads[SETTLED], "count")
    assert growth <= 16, f"GPU memory grew by {growth:.0f} MiB from group {SETTLED} to {GROUPS}"
    assert threads[-1] <= threads[SETTLED], f"threads grew: {threads}"


def abort_one(world: World, device: torch.device) -> None:
    """A group with work under way is aborted from both sides; the next one works."""
    group = make(world, GROUPS)
    tensor = torch.ones(64 * MIB, device=device)
    for _ in range(20):
        dist.all_reduce(tensor, async_op=True)
    began = time.perf_counter()
    group.release()  # what the agent does when it hears of a failure
    group.abort()  # what the worker does then
    torch.cuda.synchronize(device)
    figure("nccl_abort", (time.perf_counter() - began) * 1e3, "ms")
    assert not dist.is_initialized()
    following = make(world, GROUPS + 1)
    all_reduce(device)
    following.destroy()


def make(world: World, serial: int) -> DefaultGroup:
    group = DefaultGroup(
        world.store_mail,
        serial,
        (world.rank,),
        0,
        backend="nccl",
        timeout_seconds=60,
        check=lambda: None,
    )
    group.build()
    return group


def all_reduce(device: torch.device) -> None:
    tensor = torch.full((1 << 20,), 3.0, device=device)
    dist.all_reduce(tensor)
    assert tensor.mean().item() == 3.0
    on_cpu = torch.ones(4)
    dist.all_reduce(on_cpu)  # a tensor of the CPU goes over gloo in the same group
    assert on_cpu.sum().item() == 4


def used_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def figure(name: str, value: float, unit: str) -> None:
    sys.stdout.write(f"{name} {value:.6g} {unit}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
