"""What a rank needs before it trains with torch: a backend, a device, an environment."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpihpo.comm.devices import DeviceChoice, agree_on_backend, choose_device, place_on_node
from mpihpo.errors import ExperimentError
from mpihpo.experiment import Experiment

if TYPE_CHECKING:
    from mpihpo.comm.world import World

logger = logging.getLogger(__name__)


@contextmanager
def torch_defaults_restored() -> Iterator[None]:
    """Default type and device of tensors are afterwards as before; local.

    Otherwise a trial would depend on what its rank trained earlier.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None)
            if torch.get_default_device() != device:
                torch.set_default_device(device)


@contextmanager
def torch_set_up(world: World, experiment: Experiment) -> Iterator[tuple[str | None, Any]]:
    """Backend and device of this rank; loads torch if wanted. Collective over the world.

    Raises:
        ExperimentError: On every rank: NCCL is wanted and cannot work here.
    """
    if experiment.process_group == "none":
        yield None, "cpu"
        return
    training = experiment.training_range(world.size)
    choice: DeviceChoice | None = None
    error: Exception | None = None
    if world.rank in training:
        from mpihpo.comm.process_group import has_default_group, look_around

        local_rank, ranks_on_node = place_on_node(world.node_of, world.rank, training)
        seen = look_around(local_rank=local_rank, ranks_on_node=ranks_on_node)
        try:
            choice = choose_device(experiment.process_group, seen)
        except ExperimentError as problem:
            error = problem
        if has_default_group():
            text = "this process has a default group of torch.distributed already; destroy it first"
            error = ExperimentError("process_group", f"{text}, or use none")
    world.agree(error)
    choices = [each for each in world.comm.allgather(choice) if each is not None]
    if world.rank == 0:
        for warning in dict.fromkeys(each.warning for each in choices if each.warning):
            logger.warning("%s", warning)
    if choice is None:  # a coordinator of its own needs neither torch nor a GPU
        yield None, "cpu"
        return
    from mpihpo.comm.process_group import nccl_environment, take_device, warm_up
    from mpihpo.comm.sockets import loopback_interface

    backend = agree_on_backend(choices)
    device = take_device(choice)
    warm_up(device)
    # gloo asks the resolver for this host's address; on one node the loopback needs no resolver.
    name = "GLOO_SOCKET_IFNAME"
    set_here = len(set(world.node_names)) == 1 and name not in os.environ
    if set_here:
        os.environ[name] = loopback_interface()
    try:
        with nccl_environment(backend):
            yield backend, device
    finally:
        if set_here:
            os.environ.pop(name, None)
