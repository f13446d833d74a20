"""`python -m mpihpo run`: one job that owns its processes, and the exit status it ends with."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpihpo.errors import CoordinatorLost, ExperimentError, InternalError, ResultsError
from mpihpo.instructions import COMPLETED, EVERY_TRIAL_FAILED
from mpihpo.records import Status
from mpihpo.runner.agent import Agent
from mpihpo.runner.allotted_time import seconds_left
from mpihpo.runner.job import execute
from mpihpo.runner.preparation import Request
from mpihpo.runner.session import Ended, Hooks
from mpihpo.runner.signals import stopping_on

if TYPE_CHECKING:
    from mpihpo.comm.world import World
    from mpihpo.results.reader import Results

BAD_EXPERIMENT = 2
FAULT = 70
STOPPED_EARLY = 75
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
_LAST_WORD_SECONDS = 30.0  # rank 0, set aside, ends the job from another thread
_RESERVE = 0.1  # of the time that is left, for closing everything
_LONGEST_RESERVE_SECONDS = 60.0


def main(
    path: Path,
    *,
    output: str | None,
    overrides: list[str],
    quiet: bool,
    resume: bool = False,
    force: bool = False,
) -> int:
    """Run one job on ``MPI.COMM_WORLD``; collective over it.

    With ranks that are set aside nobody can end in order: the whole job is ended with its status.

    Returns:
        The exit status, equal on all ranks.
    """
    from mpi4py import MPI

    from mpihpo.comm.world import World

    world = World(MPI.COMM_WORLD)
    sys.excepthook = _aborting(sys.excepthook)
    request = Request(
        experiment=path,
        output=output,
        overrides=overrides,
        resume=resume,
        force=force,
        stream=None if quiet else sys.stdout,
    )
    try:
        with stopping_on(_SIGNALS) as stop_with:
            left = _allotted() if world.rank == 0 else None

            def with_agent(agent: Agent) -> None:
                agent.dumps_when_silent = True
                stop_with(agent)

            hooks = Hooks(
                with_agent=with_agent, if_stranded=lambda ended: _abort(_finish(world, ended))
            )
            ended = execute(world, request, seconds_left=left, hooks=hooks)
        status = _finish(world, ended)
        if ended.results is None:
            time.sleep(_LAST_WORD_SECONDS)
    except (ExperimentError, ResultsError) as error:
        status = BAD_EXPERIMENT
        _say(world, " ".join(str(error).split()))
    except InternalError as error:
        status = FAULT
        _say(world, str(error))
    except CoordinatorLost as error:
        status = STOPPED_EARLY
        world.set_aside([0])
        _say(world, str(error), rank=world.survivor)
    world.close()
    if world.rank == world.survivor and world.lost.difference(world.dead):
        _abort(status)
    return status


def _finish(world: World, ended: Ended) -> int:
    """Show what came out, on rank 0; returns the exit status."""
    if ended.results is None:
        return STOPPED_EARLY  # rank 0 has the last word
    if world.rank == 0:
        _show(ended.results)
    if ended.unwritten is not None:
        _say(world, ended.unwritten)
        return FAULT
    return _exit_status(ended.reason, ended.results)


def _abort(status: int) -> None:
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(status)


def _allotted() -> float | None:
    """Seconds of the batch system's time that may be used; on one rank."""
    left = seconds_left()
    return None if left is None else left - min(_RESERVE * left, _LONGEST_RESERVE_SECONDS)


def _show(results: Results) -> None:
    with suppress(OSError, ValueError):  # a full or closed output does not change what came out
        sys.stdout.write(results.summary() + "\n")
        sys.stdout.flush()


def _say(world: World, text: str, rank: int = 0) -> None:
    """Tell the user once what every rank knows."""
    if world.rank == rank:
        sys.stderr.write(f"mpihpo: {text}\n")
        sys.stderr.flush()


def _exit_status(reason: str, results: Results) -> int:
    if reason not in (COMPLETED, EVERY_TRIAL_FAILED):
        return STOPPED_EARLY
    statuses = {trial["status"] for trial in results.trials}
    return 0 if Status.COMPLETED.value in statuses else 1


def _aborting(excepthook: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that ends the job: an uncaught error on one rank would leave it hanging."""

    def hook(*args: Any) -> None:
        excepthook(*args)
        _abort(FAULT)

    return hook
