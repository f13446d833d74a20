"""`python -m mpihpo run`: one job that owns its processes, and the exit status it ends with."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpihpo.errors import ExperimentError, InternalError, ResultsError
from mpihpo.instructions import COMPLETED, EVERY_TRIAL_FAILED
from mpihpo.records import Status
from mpihpo.runner.agent import Agent
from mpihpo.runner.allotted_time import seconds_left
from mpihpo.runner.job import Ended, execute
from mpihpo.runner.preparation import Request

if TYPE_CHECKING:
    from mpihpo.comm.world import World

BAD_EXPERIMENT = 2
FAULT = 70
STOPPED_EARLY = 75
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
_SAME_SIGNAL_SECONDS = 1.0
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
        stream=None if quiet or world.rank != 0 else sys.stdout,
    )
    try:
        with _signals() as with_agent:
            left = _allotted() if world.rank == 0 else None
            ended = execute(world, request, with_agent=with_agent, seconds_left=left)
    except (ExperimentError, ResultsError) as error:
        _say(world, " ".join(str(error).split()))
        world.close()
        return BAD_EXPERIMENT
    except InternalError as error:
        _say(world, str(error))
        world.close()
        return FAULT
    if world.rank == 0:
        _show(ended)
    if ended.unwritten is not None:
        _say(world, ended.unwritten)
    world.close()
    return FAULT if ended.unwritten is not None else _exit_status(ended)


def _allotted() -> float | None:
    """Seconds of the batch system's time that may be used; on one rank."""
    left = seconds_left()
    return None if left is None else left - min(_RESERVE * left, _LONGEST_RESERVE_SECONDS)


def _show(ended: Ended) -> None:
    with suppress(OSError, ValueError):  # a full or closed output does not change what came out
        sys.stdout.write(ended.results.summary() + "\n")
        sys.stdout.flush()


def _say(world: World, text: str) -> None:
    """Tell the user once what every rank knows."""
    if world.rank == 0:
        sys.stderr.write(f"mpihpo: {text}\n")
        sys.stderr.flush()


def _exit_status(ended: Ended) -> int:
    if ended.reason not in (COMPLETED, EVERY_TRIAL_FAILED):
        return STOPPED_EARLY
    statuses = {trial["status"] for trial in ended.results.trials}
    return 0 if Status.COMPLETED.value in statuses else 1


def _aborting(excepthook: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that ends the job: an uncaught error on one rank would leave it hanging."""

    def hook(*args: Any) -> None:
        from mpi4py import MPI

        excepthook(*args)
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(FAULT)

    return hook


@contextmanager
def _signals() -> Iterator[Callable[[Agent], None]]:
    """Signals that ask the job to stop, for as long as it lasts; then they do nothing more.

    srun --kill-on-bad-exit sends SIGTERM to the others as soon as the first rank has ended with
    status 75, and one that is still closing MPI must not end with another status then.
    """
    agents: list[Agent] = []
    first: dict[int, float] = {}

    def handle(number: int, frame: object) -> None:
        # A launcher may hand one Ctrl-C on twice; a person asks again after a while.
        is_repeated = time.monotonic() - first.get(number, math.inf) > _SAME_SIGNAL_SECONDS
        if is_repeated or not agents:
            # Asked again, or before there is anything to lose: go at once.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        first.setdefault(number, time.monotonic())
        agents[0].signal(signal.Signals(number).name)

    for name in _SIGNALS:
        signal.signal(getattr(signal, name), handle)
    try:
        yield agents.append
    finally:
        for name in _SIGNALS:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
