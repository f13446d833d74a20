"""Rows of the table: faults of whole jobs, and what the jobs after them make of it."""

from __future__ import annotations

import signal

from tests.faults import acts
from tests.faults.rows import BOTH, FIRST, NOT_0, JobFault, Play

RAISES = "an error in every trial"
KILLED = "kill -9, without ULFM"
STOPPED = "signals and time limits"
RESUMED = "a job that goes on under other conditions"
EMBEDDED = "embedded in a program"

IN_RUNG_1 = {"arguments": {"faults": {"1 2": "nothing on 1"}}}
GOES_ON = Play(options=("--resume",), says=("resuming after",))
LONG = {"schedule": {"scheduler": "none", "max_epochs": 40}}
REFUSED = {"status": 2, "lines": 1}


def sent(name: str, rank: int) -> dict[str, object]:
    return {"arguments": {"faults": {"0 2": f"{name} on {rank}"}}}


ROWS: tuple[JobFault, ...] = (
    *(
        JobFault(
            name=f"rank {rank}, while a trial trains on it",
            group=KILLED,
            ranks=3,
            sections={"arguments": {"faults": {"1 2": f"SIGKILL on {rank}"}}},
            plays=(Play(status=NOT_0, within=30), GOES_ON),
            outcome="the job ends, the next one goes on",
            same=True,
        )
        for rank in (1, 0)
    ),
    JobFault(
        name="the whole job",
        group=KILLED,
        sections=IN_RUNG_1,
        plays=(Play(act=acts.kill_all, status=NOT_0), GOES_ON),
        outcome="the next job goes on",
        same=True,
    ),
    *(
        JobFault(
            name=f"{name} on rank {rank}",
            group=STOPPED,
            ranks=4,
            sections={**LONG, **sent(name, rank)},
            plays=(Play(status=75, says=(f": {name}",), within=5),),
            outcome="all leave after their epoch",
            mpis=BOTH if rank in (1, 3) else FIRST,
        )
        for name, rank in (("SIGTERM", 1), ("SIGUSR1", 3), ("SIGUSR2", 0), ("SIGINT", 0))
    ),
    JobFault(
        name="SIGTERM on all ranks",
        group=STOPPED,
        sections=IN_RUNG_1,
        plays=(Play(act=acts.signal_all(signal.SIGTERM), status=75, within=5), GOES_ON),
        outcome="all leave after their epoch, the next job goes on",
        same=True,
    ),
    JobFault(
        name="Ctrl-C in a terminal",
        group=STOPPED,
        sections={**LONG, **sent("nothing", 0)},
        # Of the status that mpiexec makes of it, MPICH's is 75 and Open MPI's its own.
        plays=(Play(act=acts.ctrl_c, status=NOT_0, says=("stopping: SIG",), within=5),),
        outcome="all leave after their epoch",
    ),
    JobFault(
        name="limits.time",
        group=STOPPED,
        sections={**LONG, "limits": {"time": 1.0}},
        plays=(Play(status=75, says=("time limit",), check=acts.lasted_less_than(1.1)),),
        outcome="no epoch starts that would end too late",
    ),
    JobFault(
        name="the end of Slurm's time",
        mpis=FIRST,
        group=STOPPED,
        sections=LONG,
        plays=(
            Play(
                env=acts.slurm_ends_in(4),
                status=75,
                says=("time limit",),
                check=acts.lasted_less_than(4),
                within=8,
            ),
        ),
        outcome="no epoch starts that would end too late",
    ),
    JobFault(
        name="the end of PBS's time",
        mpis=FIRST,
        group=STOPPED,
        sections=LONG,
        plays=(
            Play(
                env=acts.pbs_ends_in(2),
                status=75,
                says=("time limit",),
                check=acts.lasted_less_than(2),
            ),
        ),
        outcome="no epoch starts that would end too late",
    ),
    JobFault(
        name="on other ranks, with other limits",
        group=RESUMED,
        after_interruption=True,
        plays=(Play(options=("--resume", "--set", "limits.trial_seconds=600"), ranks=3),),
        outcome="goes on",
        same=True,
    ),
    JobFault(
        name="trials without a state",
        group=RESUMED,
        train="whole_jobs:stateless",
        sections={"arguments": {"faults": {"1 2": "SIGTERM on 0"}}},
        plays=(Play(status=75), GOES_ON),
        outcome="go on",
        same=True,
        measured=1,
        mpis=FIRST,
    ),
    JobFault(
        name="a model with dropout, its optimizer and schedule",
        mpis=FIRST,
        group=RESUMED,
        train="with_states:train",
        ranks=1,
        sections={
            "search": {"trials": 2, "space": {"lr": {"lower": 0.01, "upper": 0.03}}},
            "schedule": {"scheduler": "successive_halving", "min_epochs": 2, "max_epochs": 8},
            "arguments": {"faults": {"1 3": "nothing on 0"}},
        },
        plays=(Play(act=acts.kill_all, status=NOT_0), GOES_ON),
        outcome="train to the same weights",
        same=True,
        measured=1,
    ),
    JobFault(
        name="with more trials",
        mpis=FIRST,
        group=RESUMED,
        after_interruption=True,
        plays=(
            Play(
                options=("--resume", "--set", "search.trials=12"),
                check=acts.has_trials(12),
            ),
        ),
        outcome="goes on",
    ),
    JobFault(
        name="with fewer trials than were started",
        mpis=FIRST,
        group=RESUMED,
        after_interruption=True,
        plays=(
            Play(
                options=("--resume", "--set", "search.trials=2"),
                says=("search.trials: 2 is fewer than the 8 trials that the run has started",),
                **REFUSED,
            ),
        ),
        outcome="refused",
    ),
    JobFault(
        name="with another space",
        group=RESUMED,
        after_interruption=True,
        plays=(
            Play(
                options=("--resume", "--set", "search.space.x.upper=90"),
                says=("search.space.x.upper: is 90, was 99", "--force"),
                **REFUSED,
            ),
            Play(options=("--resume", "--force", "--set", "search.space.x.upper=90")),
        ),
        outcome="refused with the difference; goes on with --force",
    ),
    JobFault(
        name="with another training function",
        mpis=FIRST,
        group=RESUMED,
        after_interruption=True,
        plays=(
            Play(
                before=acts.change_train_function,
                options=("--resume",),
                says=("the file of whole_jobs.py:train has changed", "--force"),
                **REFUSED,
            ),
            Play(options=("--resume", "--force")),
        ),
        outcome="refused with the difference; goes on with --force",
        same=True,
    ),
    JobFault(
        name="when everything is done",
        mpis=FIRST,
        group=RESUMED,
        after_interruption=True,
        plays=(GOES_ON, GOES_ON),
        outcome="nothing is done twice",
        same=True,
        measured=1,
    ),
    JobFault(
        name="where no job was",
        mpis=FIRST,
        group=RESUMED,
        plays=(
            Play(
                options=("--resume",),
                says=("output: {folder}/run holds no journal.jsonl; expected the folder of the ",),
                **REFUSED,
            ),
        ),
        outcome="refused",
    ),
    JobFault(
        name="every trial fails",
        group=RAISES,
        train="whole_jobs:fails",
        plays=(Play(status=1, says=("8 trials (8 failed)", ": every trial failed")),),
        outcome="the job ends and says so",
    ),
    JobFault(
        name="every trial fails",
        group=EMBEDDED,
        train="whole_jobs:fails",
        program=("embedded.py",),
        plays=(Play(says=tuple(f"rank {r} goes on after every trial failed" for r in (0, 1))),),
        outcome="run() returns on every rank",
    ),
    JobFault(
        name="a searcher that raises",
        group=EMBEDDED,
        sections={
            "search": {
                "searcher": "embedded:Raising",
                "trials": 8,
                "space": {"x": {"lower": 0, "upper": 99, "integer": True}},
            }
        },
        program=("embedded.py",),
        plays=(Play(says=tuple(f"rank {r} goes on after InternalError" for r in (0, 1))),),
        outcome="an exception on every rank",
    ),
    JobFault(
        name="a wrong experiment",
        mpis=FIRST,
        group=EMBEDDED,
        sections={"schedule": {"max_epochs": 0}},
        program=("embedded.py",),
        plays=(Play(says=tuple(f"rank {r} goes on after ExperimentError" for r in (0, 1))),),
        outcome="an exception on every rank",
    ),
)
