"""Training functions without torch; each checks that torch was not even imported."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

FAILED_BY_PEER = (
    *("allreduce", "Allreduce", "Barrier", "bcast", "recv", "Recv", "mean", "epochs"),
    *("attach", "Split"),
)


class Chosen(Exception):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__(lambda: None)


def wrong(config, trial):
    """The leader does what the configuration says."""
    assert "torch" not in sys.modules
    kind = config["kind"]
    for epoch in trial.epochs():
        if kind == "ends the loop":
            break
        if kind in ("nan", "inf", "-inf"):
            trial.report(epoch, loss=float(kind))
        elif kind == "text":
            trial.report(epoch, loss="low\n")
        elif kind == "None":
            trial.report(epoch, loss=None)
        elif kind == "two numbers":
            trial.report(epoch, loss=np.zeros(2))
        elif kind == "another metric":
            trial.report(epoch, accuracy=1.0)
        elif kind == "a later epoch":
            trial.report(epoch + 1, loss=1.0)
        elif kind == "epoch 0":
            trial.report(0, loss=1.0)
        elif kind == "nan beside":
            trial.report(epoch, loss=1.0, other=float("nan"), **{"a/b": 1, "": 2, "\u00e9": 3})
        elif kind == "no text":
            raise Unprintable
        elif kind == "no pickle":
            raise Unpicklable
        elif kind == "odd characters":
            raise Chosen("line one\nline two \udc80\x00\x1b[31m\u00e9 " + "long " * 1000)
        elif kind == "recursion":
            recurse()
        elif kind == "iteration":
            next(iter(()))
        elif kind == "exits":
            sys.exit("enough")
        elif kind == "a message nobody takes":
            trial.comm.isend("hello", 0)
            trial.report(epoch, loss=3.0)
        elif kind == "frees the communicator":
            trial.comm.Free()
            trial.report(epoch, loss=4.0)
        elif kind == "changes the folder":
            os.chdir("/")
            trial.report(epoch, loss=5.0)
        elif kind == "an integer":
            trial.report(epoch, loss=np.int64(6))
        elif kind == "attaches twice":
            trial.attach(a=np.zeros(1))
            trial.attach(a=np.zeros(1))
        elif kind == "attaches a number":
            trial.attach(a=1)
        else:
            assert kind == "nothing reported"


def recurse() -> None:
    recurse()


def peer(config, trial):
    """Rank ``failing`` of the trial runs out of memory while the others wait for it."""
    assert "torch" not in sys.modules
    comm, where = trial.comm, config["where"]
    if trial.rank == config["failing"]:
        raise MemoryError(f"while the others are in {where}")
    other = config["failing"]
    if where in ("allreduce", "bcast"):
        getattr(comm, where)(1)
        comm.barrier()
    elif where == "Allreduce":
        comm.Allreduce(np.zeros(1000), np.zeros(1000))
    elif where == "Barrier":
        comm.Barrier()
    elif where == "recv":
        comm.recv(source=other)
    elif where == "Recv":
        comm.Recv(np.zeros(3), source=other)
    elif where == "mean":
        trial.mean(1.0)
    elif where == "epochs":
        for epoch in trial.epochs():
            trial.report(epoch, loss=1.0)
    elif where == "attach":
        trial.attach(weights=np.zeros(1000))
    else:
        comm.Split(0).Barrier()


def every_tenth(config, trial):
    assert "torch" not in sys.modules
    for epoch in trial.epochs():
        if trial.id % 10 == 3:
            raise Chosen(f"trial {trial.id}")
        trial.report(epoch, loss=config["x"])


def always(config, trial):
    raise Chosen("as always")


def slow(config, trial):
    """Epochs of ``seconds`` each, in steps that every rank of the trial takes part in."""
    assert "torch" not in sys.modules
    log = Path(trial.arguments["log"])
    weights = np.zeros(2)
    trial.attach(weights=weights)
    for epoch in trial.epochs():
        until = time.monotonic() + config["seconds"]
        while time.monotonic() < until:
            time.sleep(0.02)
        weights += trial.mean(1.0)
        assert weights[0] == epoch
        (log / f"trial{trial.id}-rank{trial.rank}-of-{trial.world_size}").write_text(str(epoch))
        trial.report(epoch, loss=config["seconds"])
    # Reached at an epoch's end, also when the job's time is over.
    (log / f"left{trial.id}-rank{trial.rank}").touch()


def counted(config, trial):
    """Checks on every rung that the state is the one of the epoch before."""
    assert "torch" not in sys.modules
    weights = np.full(4, 7.0 * trial.rank)
    trial.attach(weights=weights)
    if trial.rung == 0 and config["x"] == trial.arguments.get("slow"):
        time.sleep(0.5)
    for epoch in trial.epochs():
        expected = 0 if trial.start == 0 and epoch == 1 else config["x"] * (epoch - 1)
        assert np.allclose(weights, expected), (weights, expected)
        assert trial.comm.allreduce(1) == trial.world_size
        weights += config["x"]
        trial.report(epoch, loss=config["x"], ranks=trial.world_size)
