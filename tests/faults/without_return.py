"""Rows of the table: ranks that never return from the training function, or die in it."""

from __future__ import annotations

from typing import Any

from tests.faults import acts
from tests.faults.rows import ANY, FAILED, FINISHED, SECOND, JobFault, Play, TrialFault, TrialJob

STUCK = "a rank that never returns"
MISMATCH = "ranks of a trial that wait for each other in different calls"
DEAD = "kill -9 of a rank, with ULFM"
BUDGET = "64 parked trials and limits.state_bytes"

SECONDS = 2.0
LIMITS = {"trial_seconds": SECONDS, "grace_seconds": 3}
PATIENT = {"trial_seconds": SECONDS, "grace_seconds": 20}
"""For ranks that come back: on a machine with few cores, half a dozen of them take their time."""


def stuck_job(ranks: int = 5, **sections: Any) -> TrialJob:
    return TrialJob(
        train="stuck:train",
        ranks=ranks,
        width=2,
        sections={"limits": LIMITS, **sections},
        is_quiet=False,
        spares=24,
    )


DYING: dict[str, Any] = {
    "train": "stuck:train",
    "ranks": 5,
    "width": 2,
    # The fault is in epoch 2: a state is kept by then.
    "sections": {"schedule": {"scheduler": "successive_halving", "max_epochs": 2}},
    "ulfm": True,
    "is_quiet": False,
    "spares": 24,
}

JOBS: dict[str, TrialJob] = {
    "stuck": stuck_job(ranks=8, limits=PATIENT),
    "set aside": stuck_job(),
    "set aside, holding the GIL": stuck_job(
        limits={"trial_seconds": 60, "heartbeat_seconds": 2, "grace_seconds": 2}
    ),
    "back": stuck_job(limits={"trial_seconds": 2, "grace_seconds": 1}),
    "mismatch": stuck_job(limits={"heartbeat_seconds": 4}),
    "gloo": TrialJob(
        train="stuck:with_gloo",
        ranks=3,
        width=3,
        sections={"limits": PATIENT, "process_group": "gloo"},
        is_quiet=False,
        seconds=120,
    ),
    "a rank dies": TrialJob(**DYING),
    "rank 0 dies": TrialJob(**DYING),
}

# What one rank does for ever, and where its stack must show it to stand.
FOR_EVER = {
    "an endless loop": ("endless loop", "endless_loop"),
    "a loop that catches every Exception": ("loop that swallows", "loop_that_swallows"),
    "time.sleep": ("asleep", "asleep"),
    "a lock": ("lock", "waits_for_a_lock"),
    "the queue of a thread that is gone": ("queue", "waits_for_a_queue"),
    "a read of a pipe": ("pipe", "reads_a_pipe"),
    "a sleep in libc": ("libc sleep", "sleeps_in_libc"),
}

TRIAL_ROWS: tuple[TrialFault, ...] = (
    TrialFault(
        name="steps without an end, of all ranks",
        group=STUCK,
        job="stuck",
        case={"kind": "slow"},
        error="TrialTimeout",
        message=("took longer than limits.trial_seconds: 2",),
    ),
    *(
        TrialFault(
            name=name,
            group=STUCK,
            job="stuck",
            case={"kind": kind},
            positions=(0, 1) if kind == "endless loop" else (1,),
            error="TrialTimeout",
            says=(f" in {function}",),
        )
        for name, (kind, function) in FOR_EVER.items()
    ),
    TrialFault(
        name="a call that no signal ends",
        group=STUCK,
        job="set aside",
        case={"kind": "never returns"},
        positions=(1,),
        error="TrialTimeout",
        says=("is set aside", " in never_returns"),
        aside=1,
    ),
    TrialFault(
        name="a call that holds the GIL",
        group=STUCK,
        job="set aside, holding the GIL",
        case={"kind": "holds the GIL"},
        positions=(1,),
        error="TrialTimeout",
        says=("is set aside",),
        aside=1,
    ),
    TrialFault(
        name="a call that returns after all",
        group=STUCK,
        job="back",
        case={"kind": "late"},
        positions=(1,),
        error="TrialTimeout",
        says=("is set aside", "is back"),
    ),
    *(
        TrialFault(
            name=name,
            group=MISMATCH,
            job="mismatch",
            case={"kind": kind},
            positions=(0, 1),
            error=error,
            message=message,
        )
        for name, kind, error, message in (
            (
                "a receive, while the others are in Barrier",
                "recv",
                "CollectiveMismatch",
                ("its ranks wait in vain: ", " in Barrier at stuck.py", " in recv at stuck.py"),
            ),
            # MPI itself takes one for the other: the ranks miss each other a step later, or an
            # error of MPI comes of it.
            ("Allreduce, while the others are in Barrier", "other collective", "", ()),
        )
    ),
    *(
        TrialFault(
            name=name,
            group=group,
            job="gloo",
            case={"kind": kind},
            positions=(1,),
            error=error,
            says=says,
        )
        for name, group, kind, error, says in (
            ("asleep while the others are in all_reduce", STUCK, "asleep", "", ("with_gloo",)),
            ("a receive, the others in all_reduce", MISMATCH, "receives", "", ("with_gloo",)),
            ("broadcast, the others in all_reduce", MISMATCH, "broadcast", "", ("with_gloo",)),
        )
    ),
    TrialFault(
        name="a rank that trains",
        group=DEAD,
        job="a rank dies",
        case={"kind": "killed"},
        positions=(1,),
        error="RankLost",
        endings=(FINISHED, FAILED, FINISHED),
        says=("rank 1 died",),
        aside=1,
        mpis=SECOND,
    ),
    TrialFault(
        name="rank 0, which coordinates",
        group=DEAD,
        job="rank 0 dies",
        case={"kind": "killed"},
        positions=(0,),
        # The journal, from which another rank takes over, has no outcome of that evaluation.
        endings=(FINISHED, FINISHED),
        says=("rank 0 died", "resuming after"),
        aside=1,
        mpis=SECOND,
    ),
)

JOB_ROWS: tuple[JobFault, ...] = (
    JobFault(
        name="rank 0, holding the GIL",
        group=STUCK,
        ranks=3,
        sections={
            "arguments": {"faults": {"1 2": "GIL held on 0"}},
            "limits": {"heartbeat_seconds": 2, "grace_seconds": 2},
        },
        plays=(Play(status=75), Play(options=("--resume",), says=("resuming after",))),
        outcome="the job ends, the next one goes on",
        same=True,
    ),
    JobFault(
        name="embedded in a program",
        group=STUCK,
        ranks=4,
        sections={"arguments": {"faults": {"0 1": "no return on 3"}}, "limits": LIMITS},
        program=("embedded.py", "--without-a-rank"),
        plays=(
            Play(status=ANY, says=tuple(f"rank {r} goes on after completed" for r in range(3))),
        ),
        outcome="run() returns on the other ranks",
    ),
    JobFault(
        name=f"{acts.STATES} states of {acts.STATE_BYTES >> 20} MiB",
        group=BUDGET,
        train="whole_jobs:large_states",
        sections={
            "search": {
                "trials": acts.STATES,
                "space": {"x": {"lower": 0, "upper": 99, "integer": True}},
            },
            "schedule": {"scheduler": "successive_halving", "max_epochs": 2},
            "limits": {"state_bytes": acts.BUDGET_BYTES},
            "arguments": {"bytes": acts.STATE_BYTES, "seconds": 0.05},
        },
        plays=(
            Play(
                act=acts.watch_states, says=("limits.state_bytes",), check=acts.kept_within_memory
            ),
        ),
        outcome="the least promising states go first",
    ),
)
