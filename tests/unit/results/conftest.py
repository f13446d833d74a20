"""A small run with everything that tables have to cope with."""

from __future__ import annotations

import pytest

from mpihpo.records import (
    Allocation,
    Ending,
    Evaluation,
    Failure,
    Objective,
    Outcome,
    Report,
    RungPlan,
    RungResult,
    Spent,
    Status,
    TrialRecord,
)
from mpihpo.results.tables import ResultTables

CONFIGS = (
    {"lr": 0.1, "width": 64, "optimizer": "sgd", "momentum": 0.9, "id": True, "norm": None},
    {"lr": 1e-4, "width": 128, "optimizer": "adam", "id": False, "norm": "batch"},
    {"lr": 0.03, "width": 64, "optimizer": "adäm", "id": True, "norm": 3},
)


def make_outcome(
    trial: int,
    rung: int,
    ranks: tuple[int, ...],
    value: float | None,
    t_start: float,
    t_stop: float,
) -> Outcome:
    """An evaluation of epochs 2**rung - 1 to 2**(rung + 1) - 1; it failed if value is None."""
    start, stop = 2**rung - 1, 2 ** (rung + 1) - 1
    record = TrialRecord(id=trial, config=CONFIGS[trial], seed=100 + trial)
    reports = (
        ()
        if value is None
        else tuple(
            Report(epoch, {"loss": value + stop - epoch, "val/acc": 0.5}, 0.25 * (epoch - start))
            for epoch in range(start + 1, stop + 1)
        )
    )
    return Outcome(
        allocation=Allocation(
            serial=10 * rung + trial,
            evaluation=Evaluation(trial=record, rung=rung, start=start, stop=stop),
            ranks=ranks,
            holders=ranks[:1] if rung else (),
            keepers=ranks[:1],
        ),
        ending=Ending.FAILED if value is None else Ending.FINISHED,
        reports=reports,
        objective=value,
        failure=None
        if value is not None
        else Failure(
            rank=ranks[-1], kind="ValueError", message="bad\n" + 300 * "é", traceback="Trace\n  x"
        ),
        t_start=t_start,
        t_stop=t_stop,
        spent=Spent(0.1, 0.05, t_stop - t_start - 0.2, 0.05),
    )


OUTCOMES = (
    make_outcome(0, 0, (0, 1), 0.9, 0.0, 2.0),
    make_outcome(1, 0, (3, 2, 4), 0.5, 0.0, 3.0),
    make_outcome(2, 0, (0,), None, 2.0, 3.0),
    make_outcome(0, 1, (0, 1, 3), 0.7, 3.0, 6.0),
)


@pytest.fixture
def tables() -> ResultTables:
    tables = ResultTables(
        "train: module:train\n",
        17,
        Objective(metric="loss"),
        ["lr", "width", "optimizer", "momentum", "id", "norm"],
        ["n1", "n1", "n1", "n2", "n2"],
        {"mpihpo": "0.1.0"},
    )
    tables.add_ladder(
        [
            RungPlan(rung=0, start=0, stop=1, trials=3),
            RungPlan(rung=1, start=1, stop=3, trials=1),
            RungPlan(rung=2, start=3, stop=7, trials=1),
        ]
    )
    for outcome in OUTCOMES[:3]:
        tables.add(outcome)
    tables.add_rung(
        RungResult(rung=0, start=0, stop=1, evaluated=3, failed=1, promoted=(0,), best=0.5)
    )
    tables.add(OUTCOMES[3])
    tables.add_rung(
        RungResult(rung=1, start=1, stop=3, evaluated=1, failed=0, promoted=(), best=0.7)
    )
    tables.set_status(0, Status.COMPLETED)
    tables.set_status(1, Status.STOPPED)
    tables.finish("every rung is closed", 7.0)
    return tables
