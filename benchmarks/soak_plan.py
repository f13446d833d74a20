"""Which fault each trial of the soak suffers, and whether what became of it is right; pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

RUNGS = 2
EPOCHS_PER_RUNG = 2
NOTHING = "nothing"

ERRORS: dict[str, frozenset[str]] = {
    "exception": frozenset({"Chosen"}),
    "exception in a thread": frozenset({"Chosen"}),
    "exception in state_dict": frozenset({"Chosen"}),
    "sys.exit": frozenset({"SystemExit"}),
    "out of memory": frozenset({"MemoryError"}),
    "nan": frozenset({"ObjectiveError"}),
    "text": frozenset({"ObjectiveError"}),
    "no report": frozenset({"MissingReportError"}),
    "leaves early": frozenset({"TrialError", "MissingReportError"}),
    "goes ahead": frozenset({"TrialError", "MissingReportError", "TrialTimeout"}),
    "endless loop": frozenset({"TrialTimeout"}),
    "sleep": frozenset({"TrialTimeout", "CollectiveMismatch"}),
    "lock": frozenset({"TrialTimeout", "CollectiveMismatch"}),
    "sleep in libc": frozenset({"TrialTimeout", "CollectiveMismatch"}),
    "other call": frozenset({"TrialTimeout", "CollectiveMismatch"}),
    "deaf for a while": frozenset({"TrialTimeout", "CollectiveMismatch"}),
}
"""By kind of fault: the errors that its trial may end with."""

OF_THE_LEADER = frozenset({"exception in state_dict", "nan", "text", "no report"})
"""What counts on rank 0 of a trial only."""
LONG = frozenset(
    {
        *("endless loop", "sleep", "lock", "sleep in libc"),
        *("other call", "goes ahead", "deaf for a while"),
    }
)
"""What takes seconds to notice: drawn less often."""

MOST_GROWTH = {"descriptors": 3, "threads": 2, "python threads": 2, "memory_mib": 24}
"""On any rank."""
MOST_COMMUNICATORS = 4
COMMUNICATORS_PER_FAILURE = 3
"""The communicator of a failed evaluation of several ranks is never freed; inside MPICH that is up
to three of them."""
MIB_PER_EVALUATION = 4 / 1024
"""Rank 0 keeps the record of all evaluations in memory."""

_FAULTY = 0.5
_LONG = 0.15  # of those


@dataclass(frozen=True, slots=True)
class Plan:
    """What a trial does."""

    kind: str
    rung: int
    epoch: int
    """In which the fault comes."""
    place: float
    """Of the rank that suffers it, as a share of the trial's ranks."""
    size: float
    """How many ranks the trial gets, as a share of the job's."""

    def position(self, ranks: int) -> int:
        """The rank of the group that suffers the fault."""
        return 0 if self.kind in OF_THE_LEADER else int(self.place * ranks)

    def width(self, ranks: int) -> int:
        """Ranks that the trial gets of so many."""
        return 1 + int(self.size * ranks)


def draw(seed: int, trial: int) -> Plan:
    """The plan of a trial; depends on the seed and the trial alone."""
    rng = random.Random(f"{seed} {trial}")
    kind = NOTHING
    if rng.random() < _FAULTY:
        is_long = rng.random() < _LONG
        kind = rng.choice([each for each in ERRORS if (each in LONG) == is_long])
    rung = rng.randrange(RUNGS)
    # In the last epoch, what keeps the state comes after it, and nobody could go ahead.
    last = EPOCHS_PER_RUNG - (kind == "goes ahead")
    epoch = EPOCHS_PER_RUNG * rung + rng.randint(1, last)
    return Plan(kind, rung, epoch, rng.random(), rng.random())


@dataclass(frozen=True, slots=True)
class Account:
    """What the results say of a trial."""

    trial: int
    status: str
    rung: int
    error: str
    """Class of its error; empty: it has none."""
    was_spared: bool = False
    """Its fault did not come: the job was about to end."""


def problem_with(plan: Plan, account: Account) -> str | None:
    """What is wrong with what became of a trial; None: it is as planned."""
    came_to = f"trial {account.trial} ({plan.kind} in rung {plan.rung}): {account.status}"
    came_to += f" in rung {account.rung}"
    if account.error:
        came_to += f", {account.error}"
    kind = NOTHING if account.was_spared else plan.kind
    if account.status == "failed":
        if kind == NOTHING or account.error not in ERRORS[kind]:
            return came_to
        return None if account.rung == plan.rung else came_to
    if account.status == "completed":
        return came_to if account.error or kind != NOTHING else None
    return None  # the job's time was over


Entry = tuple[float, int, int]
"""When a rank entered a training function, of which trial and rung."""


def seconds_to_release(
    entries: Sequence[Sequence[Entry]], faults: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """By trial and rung: from its fault until all its ranks had entered their next evaluation.

    Those of whose ranks one entered none any more, at the job's end, are left out.

    Args:
        entries: Of each rank, in order.
        faults: When a fault was injected.
    """
    again: dict[tuple[int, int], list[float]] = {}
    for of_rank in entries:
        following = [*(entry[0] for entry in of_rank[1:]), float("inf")]
        for (_, trial, rung), next_time in zip(of_rank, following, strict=True):
            if (trial, rung) in faults:
                again.setdefault((trial, rung), []).append(next_time)
    seconds = {key: max(times) - faults[key] for key, times in again.items()}
    return {key: value for key, value in seconds.items() if value != float("inf")}


Sample = Mapping[str, float]
"""What must not grow, and ``time``: seconds since the job's start."""


def growth(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """By kind: how much more a rank has at the job's end than after warming up.

    Medians of what was seen from 10 to 40 % of the time, and from 70 % on.
    """
    early = [each for each in samples if 0.1 * seconds <= each["time"] <= 0.4 * seconds]
    late = [each for each in samples if each["time"] >= 0.7 * seconds]
    if not early or not late:
        return {}
    kinds = [kind for kind in samples[0] if kind != "time"]
    return {kind: _median(late, kind) - _median(early, kind) for kind in kinds}


def _median(samples: Iterable[Sample], kind: str) -> float:
    return median(each[kind] for each in samples)


def too_much(grown: Mapping[str, float], rank: int, evaluations: int) -> list[str]:
    """What has grown beyond its bound on a rank."""
    if not grown:
        return ["too few samples to say what has grown"]
    aside = COMMUNICATORS_PER_FAILURE * grown["failed groups"]
    bounds = dict(MOST_GROWTH, communicators=MOST_COMMUNICATORS + aside)
    if rank == 0:
        bounds["memory_mib"] += MIB_PER_EVALUATION * evaluations
    return [
        f"{kind} have grown by {grown[kind]:g}, at most {most:g} is right"
        for kind, most in bounds.items()
        if grown[kind] > most
    ]
