"""Faults of a training function that uses no torch; each trial does what its case says."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from faulty import Chosen, Unsaveable
from marks import is_first, note


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def train(config, trial):
    assert "torch" not in sys.modules
    note(trial, "entered")
    case = trial.arguments["cases"][config["case"]]
    KINDS[case.get("kind", "nothing")](case, trial)


def raises(case, trial):
    """One rank raises at some place, while the others go on to what they do next."""

    def fails(where) -> None:
        if where == case["where"] and trial.rank == case["position"]:
            note(trial, "fault")
            raise_(case["what"])

    fails("before attach")
    extra = Unsaveable(fails)
    trial.attach(weights=np.zeros(100), extra=extra)
    for epoch in trial.epochs():
        if epoch == 2:
            fails("in an epoch")
            with ThreadPoolExecutor(1) as pool:
                pool.submit(fails, "in a loader's thread").result()
        trial.mean(1.0)
        trial.report(epoch, loss=1.0)
    extra.is_trained = True
    fails("after the last epoch")


def raise_(what):
    if what == "an exception":
        raise Chosen("as chosen")
    if what == "sys.exit":
        sys.exit(3)
    if what == "out of memory":
        raise MemoryError("no room for 20 GiB")
    if what == "recursion":
        raise_(what)
    if what == "an error without text":
        raise Unprintable
    assert what == "a StopIteration"
    next(iter(()))


def reports(case, trial):
    """The leader reports what is no objective."""
    what = case["what"]
    weights = np.zeros(1)
    for epoch in trial.epochs():
        if trial.rank == 0:
            note(trial, "fault")
        if what == "leaves the loop":
            break
        if what in ("nan", "inf", "-inf"):
            trial.report(epoch, loss=float(what))
        elif what == "text":
            trial.report(epoch, loss="low\n")
        elif what == "None":
            trial.report(epoch, loss=None)
        elif what == "two numbers":
            trial.report(epoch, loss=np.zeros(2))
        elif what == "another metric":
            trial.report(epoch, accuracy=1.0)
        elif what == "a later epoch":
            trial.report(epoch + 3, loss=1.0)
        elif what == "epoch 0":
            trial.report(0, loss=1.0)
        elif what == "attaches twice":
            trial.attach(a=weights)
            trial.attach(a=weights)
        else:
            assert what == "nothing"


def peer(case, trial):
    """One rank runs out of memory while the others wait for it."""
    comm, where, other = trial.comm, case["where"], case["position"]
    if trial.rank == other:
        note(trial, "fault")
        raise MemoryError(f"while the others are in {where}")
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
        assert where == "Split"
        comm.Split(0).Barrier()
    comm.Barrier()  # for one whose word was only on its way


def differs(case, trial):
    """One rank goes another way through the epochs than the others."""
    what, is_other = case["what"], trial.rank == case["position"]
    if is_other:
        note(trial, "fault")
    if what == "enters no loop" and is_other:
        return
    for epoch in trial.epochs():
        trial.report(epoch, loss=1.0)
        if epoch == 1 and is_other:
            if what == "leaves after an epoch":
                return
            if what == "goes an epoch ahead":
                epochs = trial.epochs()
                next(epochs)
                next(epochs)


def first_time(case, trial):
    """A fault that does not come again."""
    if case["what"] == "out of memory on one rank":
        fails = trial.world_size == 1
    else:
        fails = trial.comm.bcast(is_first(trial) if trial.rank == 0 else None)
    for epoch in trial.epochs():
        if fails and trial.rank == 0:
            note(trial, "fault")
            if case["what"] == "out of memory on one rank":
                raise MemoryError("no room on one rank")
            trial.report(epoch, loss=float("nan"))
        trial.report(epoch, loss=1.0)


def nothing(case, trial):
    time.sleep(0.1)  # so that ranks which are free a little later find some left
    for epoch in trial.epochs():
        trial.mean(1.0)
        trial.report(epoch, loss=2.0)


KINDS = {
    "raises": raises,
    "reports": reports,
    "peer": peer,
    "differs": differs,
    "first time": first_time,
    "nothing": nothing,
}
