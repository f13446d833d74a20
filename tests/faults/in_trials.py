"""Rows of the table: faults that end one evaluation, and its ranks take the next one."""

from __future__ import annotations

from tests.faults.rows import BOTH, FAILED, FINISHED, FIRST, TrialFault, TrialJob

ANYWHERE = "an error anywhere in the training function, on any rank"
OBJECTIVE = "no usable objective"
DIFFERENT = "ranks of a trial that go different ways"

JOBS: dict[str, TrialJob] = {
    "light": TrialJob(train="light:train", ranks=6, width=3),
    "retries": TrialJob(train="light:train", ranks=4, width=1, sections={"limits": {"retries": 1}}),
    "torch": TrialJob(
        train="with_torch:train",
        ranks=3,
        width=3,
        sections={
            "process_group": "gloo",
            "batch": {"size": 6},
            "schedule": {"scheduler": "none", "max_epochs": 1},
        },
        seconds=120,
    ),
}

ALL = (0, 1, 2)

RAISED = {
    "an exception": ("Chosen", 'raise Chosen("as chosen")'),
    "sys.exit": ("SystemExit", "sys.exit(3)"),
    "out of memory": ("MemoryError", 'raise MemoryError("no room for 20 GiB")'),
    "recursion": ("RecursionError", "raise_(what)"),
    "an error without text": ("Unprintable", "raise Unprintable"),
    "a StopIteration": ("StopIteration", "next(iter(()))"),
}
PLACES = (
    *("before attach", "in an epoch", "in a loader's thread", "in state_dict"),
    "after the last epoch",
)
# The ranks that reach the place: only those that keep a state are asked for it.
REACHED = {"in state_dict": (0,)}
# Every place with one error, and every error at one place.
RAISING = [("an exception", place) for place in PLACES] + [
    (what, "in an epoch") for what in RAISED if what != "an exception"
]
WAITS = (
    *("allreduce", "Allreduce", "Barrier", "bcast", "recv", "Recv", "mean", "epochs", "attach"),
    "Split",
)

# What the leader does: class and text of the error.
REPORTED = {
    "nan": ("ObjectiveError", "epoch 1: loss is nan"),
    "inf": ("ObjectiveError", "epoch 1: loss is inf"),
    "-inf": ("ObjectiveError", "epoch 1: loss is -inf"),
    "text": ("ObjectiveError", "epoch 1: loss is 'low\\n', not a number"),
    "None": ("ObjectiveError", "epoch 1: loss is None, not a number"),
    "two numbers": ("ObjectiveError", "epoch 1: loss is array([0., 0.]), not a number"),
    "another metric": ("MissingReportError", "epoch 1 ended without trial.report(1, loss=...)"),
    "nothing": ("MissingReportError", "epoch 1 ended without trial.report(1, loss=...)"),
    "leaves the loop": ("MissingReportError", "epoch 1 ended without trial.report(1, loss=...)"),
    "a later epoch": ("TrialError", "report(4): expected an epoch from 1 to 3"),
    "epoch 0": ("TrialError", "report(0): expected an epoch from 1 to 3"),
    "attaches twice": ("StateError", "attach(a=...): this name is attached already"),
}

# What one rank does with its epochs; on which, and the error.
WAYS = (
    ("enters no loop", (0,), "MissingReportError", "epoch 1 ended without"),
    ("enters no loop", (1, 2), "TrialError", "rank {position} of the trial"),
    ("leaves after an epoch", (0,), "MissingReportError", "epoch 2 ended without"),
    ("leaves after an epoch", (1, 2), "TrialError", "rank {position} of the trial left"),
    ("goes an epoch ahead", (0,), "TrialError", ", its leader after epoch 0"),
    ("goes an epoch ahead", (1, 2), "TrialError", "rank {position} of the trial goes on after"),
)

# With torch: the error's class, the line that raises, the ranks that reach it.
IN_TORCH = {
    "before the first collective": ("Chosen", "raise error or Chosen(here)", (0, 2)),
    "in forward": ("Chosen", "raise error or Chosen(here)", (0, 2)),
    "in backward": ("Chosen", 'context.fails("in backward")', ALL),
    "out of memory": ("OutOfMemoryError", "raise error or Chosen(here)", (0, 2)),
    "in a loader's worker": ("Chosen", "raise error or Chosen(here)", (0, 2)),
    "in a metric": ("Chosen", 'self.fails("in a metric")', (0,)),
    "sys.exit": ("SystemExit", "sys.exit(3)", (0, 2)),
    "after the loop": ("Chosen", "raise error or Chosen(here)", (0, 2)),
    "in state_dict": ("Chosen", 'self.fails("in state_dict")', (0,)),
}
# Under the second MPI the places that differ in what MPI has done by then.
WHAT_MPI_SEES = ("before the first collective", "in backward", "after the loop")

ROWS: tuple[TrialFault, ...] = (
    *(
        TrialFault(
            name=f"{what} {place}" if place.startswith("in ") else f"{what}, {place}",
            group=ANYWHERE,
            job="light",
            case={"kind": "raises", "what": what, "where": place},
            positions=REACHED.get(place, ALL),
            error=RAISED[what][0],
            line=RAISED[what][1],
        )
        for what, place in RAISING
    ),
    *(
        TrialFault(
            name=f"out of memory while the others are in {where}",
            group=ANYWHERE,
            job="light",
            case={"kind": "peer", "where": where},
            positions=ALL,
            error="MemoryError",
            message=(f"while the others are in {where}",),
            line="raise MemoryError",
        )
        for where in WAITS
    ),
    *(
        TrialFault(
            name=f"with torch: {where}",
            group=ANYWHERE,
            job="torch",
            case={"where": where},
            positions=positions,
            error=error,
            line=line,
            mpis=BOTH if where in WHAT_MPI_SEES else FIRST,
        )
        for where, (error, line, positions) in IN_TORCH.items()
    ),
    *(
        TrialFault(
            name=f"reports: {what}",
            group=OBJECTIVE,
            job="light",
            case={"kind": "reports", "what": what},
            error=error,
            message=(message,),
        )
        for what, (error, message) in REPORTED.items()
    ),
    TrialFault(
        name="NaN once, with retries",
        group=OBJECTIVE,
        job="retries",
        case={"kind": "first time", "what": "nan"},
        error="ObjectiveError",
        endings=(FAILED, FINISHED),
    ),
    TrialFault(
        name="NaN each time, with retries",
        group=OBJECTIVE,
        job="retries",
        case={"kind": "reports", "what": "nan"},
        error="ObjectiveError",
        endings=(FAILED, FAILED),
    ),
    TrialFault(
        name="out of memory on one rank, with retries: two ranks",
        group=OBJECTIVE,
        job="retries",
        case={"kind": "first time", "what": "out of memory on one rank"},
        error="MemoryError",
        endings=(FAILED, FINISHED),
        widens=True,
    ),
    *(
        TrialFault(
            name=f"{'the leader' if positions == (0,) else 'a rank'} {what}",
            group=DIFFERENT,
            job="light",
            case={"kind": "differs", "what": what},
            positions=positions,
            error=error,
            message=(message,),
        )
        for what, positions, error, message in WAYS
    ),
)
