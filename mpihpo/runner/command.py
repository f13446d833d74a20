"""`python -m mpihpo run`: one job that owns its processes, and the exit status it ends with."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpihpo.errors import (
    CoordinatorLost,
    ExperimentError,
    InternalError,
    RankLost,
    ResultsError,
)
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
_LAST_WORD_SECONDS = 30.0  # for the rank that ends the job, rank 0 from another thread if need be
_STEP_SECONDS = 0.1  # from one rank to the next, if it does not
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

    from mpihpo.comm.world import PATIENCE_SECONDS, World

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
    has_last_word, text = False, "the rank that was to end the job did not"
    patience: float | None = None
    try:
        with _signals() as stop_with:
            left = _allotted() if world.rank == 0 else None

            def with_agent(agent: Agent) -> None:
                agent.dumps_when_silent = True
                stop_with(agent)

            hooks = Hooks(
                with_agent=with_agent, if_stranded=lambda ended: _abort(_finish(world, ended))
            )
            ended = execute(world, request, seconds_left=left, hooks=hooks)
        status = _finish(world, ended)
        has_last_word = world.rank == (0 if ended.results is not None else world.survivor)
    except (ExperimentError, ResultsError) as error:
        status = BAD_EXPERIMENT
        _say(world, " ".join(str(error).split()))
    except (InternalError, CoordinatorLost) as error:
        status = FAULT if isinstance(error, InternalError) else STOPPED_EARLY
        patience, text = PATIENCE_SECONDS, str(error)
        has_last_word = world.rank == world.survivor
        _say(world, text, rank=world.survivor)
    except RankLost:
        status = STOPPED_EARLY  # of this rank alone, and the others end the job
    if not world.close(patience) or world.lost.difference(world.dead):
        if not has_last_word:
            # Whoever has it may be stuck.
            time.sleep(_LAST_WORD_SECONDS + _STEP_SECONDS * world.rank)
            _say(world, text, rank=world.rank)
        _abort(status)
    if not world.may_finalize:
        _flush()
        os._exit(status)  # MPI_Finalize, at Python's exit, may wait for a rank that has died
    return status


def _finish(world: World, ended: Ended) -> int:
    """Show what came out, on rank 0; returns the exit status."""
    if ended.results is None:
        return STOPPED_EARLY
    if world.rank == 0:
        _show(ended.results)
    if ended.unwritten is not None:
        _say(world, ended.unwritten)
        return FAULT
    return _exit_status(ended.reason, ended.results)


def _abort(status: int) -> None:
    from mpi4py import MPI

    _flush()
    MPI.COMM_WORLD.Abort(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


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


@contextmanager
def _signals() -> Iterator[Callable[[Agent], None]]:
    """Signals that ask the job to stop, for as long as it lasts; then they do nothing more.

    srun --kill-on-bad-exit sends SIGTERM to the others as soon as the first rank has ended with
    status 75, and one that is still closing MPI must not end with another status then.
    """
    for name in _SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)  # so a second one ends the process
    try:
        with stopping_on(_SIGNALS) as with_agent:
            yield with_agent
    finally:
        for name in _SIGNALS:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
