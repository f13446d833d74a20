"""What a rank needs before it trains with torch: a backend, a device, an environment."""

from __future__ import annotations

import logging
import os
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
        from mpihpo.comm.process_group import look_around

        local_rank, ranks_on_node = place_on_node(world.node_of, world.rank, training)
        seen = look_around(local_rank=local_rank, ranks_on_node=ranks_on_node)
        try:
            choice = choose_device(experiment.process_group, seen)
        except ExperimentError as problem:
            error = problem
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
