"""Training functions without torch; each checks that torch was not even imported."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np


class Chosen(Exception):
    pass


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__(lambda: None)


def odd(config, trial):
    """The leader does what the configuration says."""
    assert "torch" not in sys.modules
    kind = config["kind"]
    for epoch in trial.epochs():
        if kind == "nan beside":
            trial.report(epoch, loss=1.0, other=float("nan"), **{"a/b": 1, "": 2, "\u00e9": 3})
        elif kind == "no pickle":
            raise Unpicklable
        elif kind == "odd characters":
            raise Chosen("line one\nline two \udc80\x00\x1b[31m\u00e9 " + "long " * 1000)
        elif kind == "changes the folder":
            os.chdir("/")
            trial.report(epoch, loss=5.0)
        else:
            assert kind == "an integer"
            trial.report(epoch, loss=np.int64(6))


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
