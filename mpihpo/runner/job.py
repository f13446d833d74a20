"""A whole job: from an experiment and a communicator to results, on every rank."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpihpo.errors import CoordinatorLost
from mpihpo.experiment import Experiment
from mpihpo.results.reader import Results
from mpihpo.runner.preparation import Preparation, Request, TrainFunction, prepare
from mpihpo.runner.session import Ended, Hooks, hold_session
from mpihpo.runner.signals import stopping_on

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpihpo.comm.world import World
    from mpihpo.runner.agent import Agent

INTERRUPT = "SIGINT"

logger = logging.getLogger(__name__)


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    train: TrainFunction | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    output: str | Path | None = None,
) -> Results:
    """Run an experiment on the ranks of a communicator.

    Collective over ``comm``, which is duplicated and otherwise left alone.

    Args:
        experiment: An `Experiment`, plain mappings, or the path of a YAML file; rank 0's counts.
        train: The training function, on every rank; None: the one that the experiment names.
        comm: Any intracommunicator; None: ``MPI.COMM_WORLD``.
        output: Folder of the results; None: the experiment's ``output``, or none at all.

    Returns:
        The same results on every rank.

    Raises:
        ExperimentError: On every rank: the experiment is wrong, or the world too small for it.
        InternalError: On every rank: a fault of the runtime.
        CoordinatorLost: On the ranks that are left: rank 0 is dead, or nothing runs there any more.
        RankLost: On a rank that was set aside and comes back when the others have ended the job.
        KeyboardInterrupt: On every rank: one was interrupted, and the job stopped in order.
    """
    if comm is None:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    from mpihpo.comm.world import World

    with World(comm) as world, _interrupts() as with_agent:
        request = Request(experiment=experiment, train=train, output=output)
        ended = execute(world, request, hooks=Hooks(with_agent=with_agent))
        if ended.unwritten is not None and world.rank == 0:
            logger.error("%s", ended.unwritten)
        if ended.results is None:
            raise CoordinatorLost("rank 0, which has the results, is dead; resume the run")
        if ended.reason == INTERRUPT:
            raise KeyboardInterrupt
        return ended.results


@contextmanager
def _interrupts() -> Iterator[Callable[[Agent], None]]:
    """Ctrl-C ends the job in order; where the host has a handler of its own, that is used."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with stopping_on((INTERRUPT,) if is_default else ()) as with_agent:
        yield with_agent


def execute(
    world: World,
    request: Request,
    *,
    seconds_left: float | None = None,
    hooks: Hooks | None = None,
) -> Ended:
    """Run one job; collective over the world.

    Where ranks can die, and rank 0 does, the others become the world, and another coordinator goes
    on from the journal: as a job does that resumes a killed one, in the same processes.

    Args:
        world: The ranks.
        request: What to do.
        seconds_left: Of the allotted time, on rank 0; None: no limit but the experiment's.
        hooks: Of the owner of the process.

    Raises:
        CoordinatorLost: On the ranks that are left: rank 0 is silent, or dead and nothing of the
            run is on the disk.
    """
    preparation = prepare(world, request)
    limit = preparation.experiment.limits.time_seconds
    left = world.on_root(lambda: min(filter(None, (limit, seconds_left)), default=None))
    ends_at = None if left is None else time.monotonic() + left
    while True:
        try:
            return hold_session(
                world, request, preparation, ends_at=ends_at, hooks=hooks or Hooks()
            )
        except CoordinatorLost:
            if 0 not in world.dead or preparation.directory is None:
                raise
        world.shrink()
        request = _resuming(request, preparation)
        preparation = prepare(world, request)


def _resuming(request: Request, preparation: Preparation) -> Request:
    """To go on with what the same job has begun, on any rank."""
    return replace(
        request,
        experiment=preparation.experiment,
        train=preparation.train,
        output=preparation.directory,
        overrides=[],
        resume=True,
        force=True,
        takes_over=True,
    )
