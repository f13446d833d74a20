"""The long job of the soak, on its ranks: half of its trials suffer a fault."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soak_plan import EPOCHS_PER_RUNG, LONG, NOTHING, RUNGS, Entry, Sample, draw

from mpihpo.records import (
    Ending,
    Evaluation,
    Outcome,
    RungPlan,
    RungResult,
    Status,
    TrialRecord,
)

if TYPE_CHECKING:
    from mpihpo import Results, Trial

TRIAL_SECONDS = 4.0
GRACE_SECONDS = 2.0
DEAF_SECONDS = TRIAL_SECONDS + GRACE_SECONDS + 2.0
CALM_SECONDS = DEAF_SECONDS + 2.0
"""Before the end no rank gets stuck any more, so that all are back."""
SAMPLES = 500
"""Of what must not grow, at most so many on a rank."""


@dataclass
class Kept:
    """What a rank notes for the end."""

    entries: list[Entry] = field(default_factory=list)
    faults: dict[tuple[int, int], float] = field(default_factory=dict)
    spared: set[int] = field(default_factory=set)
    samples: list[Sample] = field(default_factory=list)
    failed_groups: int = 0
    """Evaluations of several ranks that failed here."""


_kept = Kept()


class Chosen(Exception):
    """A fault on purpose."""


# What a trial does, on the ranks.


class State:
    """Something attached, whose ``state_dict`` may fail."""

    def __init__(self) -> None:
        self.epoch = 0
        self.fails = False

    def state_dict(self) -> dict[str, int]:
        """The state, or the fault."""
        if self.fails:
            raise Chosen("in state_dict")
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take it."""
        self.epoch = state["epoch"]


def train(config: Any, trial: Trial) -> None:
    """Two epochs in each of two rungs, with the fault that the plan of the trial says."""
    plan = draw(config["seed"], trial.id)
    now = time.time()
    _kept.entries.append((now, trial.id, trial.rung))
    _take_sample(now - trial.arguments["started"], trial.arguments["seconds"] / SAMPLES)
    is_faulty = plan.kind != NOTHING and plan.rung == trial.rung
    _kept.failed_groups += is_faulty and trial.world_size > 1
    ends = trial.arguments["started"] + trial.arguments["seconds"]
    state = State()
    trial.attach(state=state)
    for epoch in trial.epochs():
        if state.epoch != epoch - 1:
            raise AssertionError(f"the state of epoch {state.epoch} before epoch {epoch}")
        time.sleep(0.01)
        trial.mean(1.0)
        state.epoch = epoch
        suffers = is_faulty and epoch == plan.epoch
        suffers = suffers and trial.rank == plan.position(trial.world_size)
        if suffers and plan.kind in LONG and time.time() > ends - CALM_SECONDS:
            _kept.spared.add(trial.id)
        elif suffers:
            _kept.faults[trial.id, trial.rung] = time.time()
            suffer(plan.kind, trial, epoch, state)
            if plan.kind == "leaves early":
                return
        trial.comm.Barrier()
        if not (suffers and plan.kind == "no report"):
            trial.report(epoch, loss=config["x"])


def suffer(kind: str, trial: Trial, epoch: int, state: State) -> None:
    """The fault of one rank."""
    if kind == "exception":
        raise Chosen("on purpose")
    if kind == "exception in a thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(suffer, "exception", trial, epoch, state).result()
    if kind == "exception in state_dict":
        state.fails = True
    if kind == "sys.exit":
        sys.exit(3)
    if kind == "out of memory":
        raise MemoryError("on purpose")
    if kind == "nan":
        trial.report(epoch, loss=float("nan"))
    if kind == "text":
        trial.report(epoch, loss="low")
    if kind == "goes ahead":
        epochs = trial.epochs()
        next(epochs)
        next(epochs)
    while kind == "endless loop":
        pass
    if kind == "sleep":
        time.sleep(3600)
    if kind == "sleep in libc":
        ctypes.CDLL(None).sleep(3600)
    if kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if kind == "other call":
        trial.comm.recv(source=0, tag=77)
    if kind == "deaf for a while":
        deaf(DEAF_SECONDS)


def deaf(seconds: float) -> None:
    """Wait where no signal ends it."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    unlock = threading.Timer(seconds, library.pthread_mutex_unlock, [mutex])
    unlock.daemon = True
    unlock.start()
    library.pthread_mutex_lock(mutex)


def _take_sample(now: float, interval: float) -> None:
    """What must not grow on this rank."""
    if _kept.samples and now - _kept.samples[-1]["time"] < interval:
        return
    from mpi4py import MPI

    # Both libraries number handles from the lowest free one, so a leak raises that of a new one.
    probe = MPI.COMM_SELF.Dup()
    handle = probe.py2f()
    probe.Free()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    _kept.samples.append(
        {
            "time": now,
            "communicators": number_of(handle),
            "failed groups": _kept.failed_groups,
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "python threads": threading.active_count(),
            "memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        }
    )


def number_of(handle: int) -> int:
    """The place of a handle among all of its kind."""
    place = handle & 0x3FFFFFF
    if handle >> 30 & 3 != 3:  # Open MPI counts, and MPICH does up to a few
        return place
    return 8 + 256 * (place >> 12) + (place & 0xFFF)  # block and place in it


class Planned:
    """An allocation policy: as many ranks as the trial's plan says."""

    def __init__(self, *, settings: Any, reduction_factor: int, world_size: int) -> None:
        self._ranks = world_size

    def width(self, evaluation: Evaluation) -> int:
        """Ranks of the evaluation."""
        trial = evaluation.trial
        return draw(trial.config["seed"], trial.id).width(self._ranks)

    def share(self, evaluations: Sequence[Evaluation], free: int) -> list[int]:
        """No more than that."""
        return [self.width(evaluation) for evaluation in evaluations]


class EachTwice:
    """A scheduler: every trial that did not fail goes on to the second rung at once."""

    def __init__(self, *, settings: Any, objective: Any, trials: Any, propose: Any) -> None:
        self._propose = propose
        self._waiting: deque[TrialRecord] = deque()
        self._status: dict[int, Status] = {}
        self._out = 0

    @classmethod
    def ladder(cls, settings: Any, trials: int) -> tuple[RungPlan, ...]:
        """As if none failed."""
        return tuple(
            RungPlan(rung=rung, start=start, stop=start + EPOCHS_PER_RUNG, trials=trials)
            for rung, start in enumerate(range(0, RUNGS * EPOCHS_PER_RUNG, EPOCHS_PER_RUNG))
        )

    def ask(self) -> Evaluation | None:
        """One that goes on, else a new one."""
        rung, trial = 0, None
        if self._waiting:
            rung, trial = 1, self._waiting.popleft()
        else:
            trial = self._propose()
        if trial is None:
            return None
        self._status[trial.id] = Status.RUNNING
        self._out += 1
        start = EPOCHS_PER_RUNG * rung
        return Evaluation(trial=trial, rung=rung, start=start, stop=start + EPOCHS_PER_RUNG)

    def tell(self, outcome: Outcome) -> None:
        """Take an outcome."""
        self._out -= 1
        evaluation = outcome.allocation.evaluation
        status = Status.PARKED
        if outcome.ending is Ending.FAILED:
            status = Status.FAILED
        elif outcome.ending is Ending.FINISHED and evaluation.rung == 0:
            self._waiting.append(evaluation.trial)
        elif outcome.ending is Ending.FINISHED:
            status = Status.COMPLETED
        self._status[evaluation.trial.id] = status

    @property
    def done(self) -> bool:
        """Never: the time ends it."""
        return False

    def results(self) -> tuple[RungResult, ...]:
        """No rung ever closes."""
        return ()

    def status(self, trial_id: int) -> Status:
        """What became of a trial."""
        return self._status[trial_id]


def run(seconds: float, seed: int, output: Path) -> tuple[Results, list[Kept] | None]:
    """Run the job; collective over all ranks.

    Returns:
        Its results, and on rank 0 what each rank noted.
    """
    from mpi4py import MPI

    import mpihpo

    experiment = {
        "objective": {"metric": "loss"},
        "search": {
            "trials": 10**6,
            "space": {"x": {"lower": 0.0, "upper": 1.0}, "seed": {"choices": [seed]}},
        },
        "schedule": {
            "scheduler": f"{__name__}:{EachTwice.__name__}",
            "max_epochs": RUNGS * EPOCHS_PER_RUNG,
        },
        "allocation": {"policy": f"{__name__}:{Planned.__name__}"},
        "limits": {
            "time": seconds,
            "trial_seconds": TRIAL_SECONDS,
            "grace_seconds": GRACE_SECONDS,
            "heartbeat_seconds": 30,
        },
        "seed": seed,
        "process_group": "none",
        "arguments": {"started": time.time(), "seconds": seconds},
    }
    results = mpihpo.run(experiment, train, output=output)
    return results, MPI.COMM_WORLD.gather(_kept, 0)
