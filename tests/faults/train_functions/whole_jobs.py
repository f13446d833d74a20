"""Deterministic training on states that are given back, with a fault of the job at a named place.

Which fault and where is in the experiment's arguments; it comes once, so that a job that goes on
does not suffer it again.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

import marks
import numpy as np


def train(config, trial):
    assert "torch" not in sys.modules
    marks.note(trial, "entered")
    weights = np.full(4, float(config["x"]))
    trial.attach(weights=weights)
    done = trial.start
    for epoch in trial.epochs():
        time.sleep(trial.arguments["seconds"])
        weights *= 0.5  # exact, so that a mean over three ranks is, too
        weights += epoch
        loss = float(trial.mean(weights.sum())) + (7 * config["x"]) % 50
        if trial.rank == 0:
            marks.note(trial, "trained", epoch=epoch, loss=loss)
        suffer(trial, epoch)
        trial.report(epoch, loss=loss)
        done = epoch
    marks.note(trial, "left", epochs=done)


def stateless(config, trial):
    marks.note(trial, "entered")
    for epoch in trial.epochs():
        time.sleep(trial.arguments["seconds"])
        if trial.rank == 0:
            marks.note(trial, "trained", epoch=epoch, loss=config["x"])
        suffer(trial, epoch)
        trial.report(epoch, loss=config["x"])


def fails(config, trial):
    marks.note(trial, "entered")
    raise ArithmeticError("as always")


def large_states(config, trial):
    marks.note(trial, "entered")
    weights = np.zeros(trial.arguments["bytes"] // 8)
    trial.attach(weights=weights)
    for epoch in trial.epochs():
        assert (weights == epoch - 1).all()
        time.sleep(trial.arguments["seconds"])
        weights += 1
        if marks.is_first(trial):
            marks.note(trial, "fault")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        marks.note(trial, "memory", bytes=pages * resource.getpagesize())
        trial.report(epoch, loss=config["x"])


def suffer(trial, epoch):
    fault = trial.arguments["faults"].get(f"{trial.rung} {epoch}")
    if fault is None:
        return
    what, _, rank = fault.partition(" on ")
    if int(rank or 0) == marks.WORLD_RANK and not Path(f"{what}.done").exists():
        Path(f"{what}.done").touch()
        if what != "room again":
            marks.note(trial, "fault")
        FAULTS.get(what, send)(what)


def send(what):
    if what != "nothing":
        os.kill(os.getpid(), getattr(signal, what))


def fill_disk(what):
    """No file of this process may grow beyond what the journal has now."""
    limit = Path("run/journal.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def empty_disk(what):
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def vanish(what):
    Path("run").rename("gone")


def no_return(what):
    """Locks what it holds itself: no signal ends that."""
    library = ctypes.PyDLL(None) if what == "GIL held" else ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


FAULTS = {
    "GIL held": no_return,
    "no return": no_return,
    "full disk": fill_disk,
    "room again": empty_disk,
    "folder gone": vanish,
}
