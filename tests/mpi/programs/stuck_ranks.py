"""Jobs through ``mpihpo.run`` in which a rank is stuck for a while, so that it can be looked at."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import mpihpo
from mpihpo.comm import world
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import CoordinatorLost, InternalError, RankLost

WORLD = MPI.COMM_WORLD
NAP_SECONDS = 0.1
STAYS_SECONDS = 4.0


class Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_deaf(seconds: float, *, holds_gil: bool = False) -> None:
    """Wait in C; whatever signals come, it is not left before."""
    library = (ctypes.PyDLL if holds_gil else ctypes.CDLL)(None)
    mutex = ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, ctypes.byref(Time(int(time.time() + seconds) + 1, 0)))


def stuck(
    rank: int, seconds: float = STAYS_SECONDS, *, holds_gil: bool = False
) -> Callable[[Any, Any], None]:
    """A training function in which a world rank is stuck once."""
    seen: list[int] = []

    def train(config: dict[str, Any], trial: Any) -> None:
        history = np.zeros(1)
        trial.attach(history=history)
        for epoch in trial.epochs():
            if WORLD.rank == rank and epoch == 2 and not seen:
                seen.append(trial.id)
                is_deaf(seconds, holds_gil=holds_gil)
            time.sleep(NAP_SECONDS)
            trial.mean(1.0)
            history += 1
            trial.report(epoch, loss=trial.id + 1.0 / epoch)

    return train


def experiment(trials: int, *, width: int = 1, epochs: int = 2, **limits: float) -> dict[str, Any]:
    return {
        "objective": {"metric": "loss"},
        "search": {"trials": trials, "space": {"x": {"lower": 0.0, "upper": 1.0}}},
        "schedule": {"scheduler": "none", "max_epochs": epochs},
        "allocation": {"policy": "fixed", "ranks": width},
        "limits": {"trial_seconds": 1, "grace_seconds": 1, **limits},
        "process_group": "none",
    }


def run(settings: dict[str, Any], train: Callable[[Any, Any], None]) -> mpihpo.Results | str:
    """The results, or the name of what was raised."""
    try:
        return mpihpo.run(settings, train)
    except mpihpo.MpihpoError as error:
        return type(error).__name__


def together() -> None:
    """As a barrier; a rank that is stuck comes at last."""
    request = WORLD.Ibarrier()
    assert wait_until(lambda: bool(request.Test()), timeout_seconds=60), "a rank did not return"


def failed(results: mpihpo.Results) -> list[str]:
    return [error for error in results.trials["error"].tolist() if error]


def comes_back_too_late() -> None:
    """The others have gone on by then; their communicator is still theirs."""
    came_to = run(experiment(6), stuck(2, 8.0))
    if WORLD.rank == 2:
        assert came_to == RankLost.__name__
    else:
        assert isinstance(came_to, mpihpo.Results), came_to
        assert came_to.reason == "completed"
        assert len(failed(came_to)) == 1
    together()
    assert WORLD.allreduce(1) == WORLD.size


def rank_0_comes_back_too_late() -> None:
    """Its other threads have ended the job, with the results on every rank."""
    results = run(experiment(6), stuck(0, 8.0))
    assert isinstance(results, mpihpo.Results), results
    assert len(failed(results)) == 1
    together()
    summaries = WORLD.allgather(results.summary())
    assert len(set(summaries)) == 1, summaries


def of_a_trial_of_several(ranks: str) -> None:
    """One member of two is stuck, as leader and not; the other one trains on meanwhile."""
    for rank in map(int, ranks):
        results = run(experiment(30, width=2), stuck(rank, 2.5))
        together()
        assert isinstance(results, mpihpo.Results), results
        (error,) = failed(results)
        assert error.startswith("TrialTimeout"), error


def watches_over_the_dispatcher() -> None:
    """Set aside it is not told any more that the dispatcher is there, and back it is again."""
    began = time.monotonic()
    results = run(experiment(26, epochs=8, heartbeat_seconds=1.2, trial_seconds=1.5), stuck(1))
    together()
    assert isinstance(results, mpihpo.Results), results
    assert results.reason == "completed"
    assert len(failed(results)) == 1
    assert time.monotonic() - began > STAYS_SECONDS + 2, "it was not there when rank 1 came back"


def holds_the_gil() -> None:
    """Rank 0 does: nothing runs there, and the others leave."""
    settings = experiment(40, heartbeat_seconds=1)
    came_to = run(settings, stuck(0, 8.0, holds_gil=True))
    if WORLD.rank:
        assert came_to == CoordinatorLost.__name__
    together()


class Faulty:
    """A searcher that fails when a rank is stuck already."""

    def __init__(self, *, space: Any, seed: int, mode: str, trials: int | None) -> None:
        self.space, self.seed = space, seed

    def ask(self, trial_id: int) -> Any:
        if trial_id == 5:
            raise LookupError("no more ideas")
        return self.space.sample(self.seed, trial_id)

    def tell(self, outcome: Any) -> None:
        pass


def while_a_fault_ends_the_job() -> None:
    """The others do not wait for it for ever; nor does its peer in the trial."""
    world.PATIENCE_SECONDS = 1.0
    settings = experiment(8, width=2, trial_seconds=60)
    settings["search"]["searcher"] = f"{__name__}:Faulty"
    began = time.monotonic()
    came_to = run(settings, stuck(3, 12.0))
    assert came_to == InternalError.__name__
    if WORLD.rank != 3:
        assert time.monotonic() - began < 10
    together()


def with_a_handler_of_the_host() -> None:
    """It still gets what is not for the runtime, and is there afterwards."""
    got: list[int] = []

    def handle(number: int, frame: object) -> None:
        got.append(number)

    def train(config: Any, trial: Any) -> None:
        os.kill(os.getpid(), signal.SIGURG)
        if trial.id == 0:
            time.sleep(60)
        for epoch in trial.epochs():
            trial.report(epoch, loss=1.0)

    signal.signal(signal.SIGURG, handle)
    results = mpihpo.run(experiment(WORLD.size), train)
    assert signal.getsignal(signal.SIGURG) is handle
    assert got
    assert set(got) == {signal.SIGURG}
    assert len(failed(results)) == 1
    assert results.reason == "completed"
    assert not any(name.startswith("torch") for name in sys.modules)
    signal.signal(signal.SIGURG, signal.SIG_DFL)
