"""The coordinator: outcomes in, instructions out.

A pure state machine between searcher, scheduler and allocation policy. It knows no MPI and no
clock; whoever drives it passes the time and carries the instructions out, for real or simulated.

                   propose                   ask                 width, share
    searcher  ---------------->  scheduler  ----->  evaluation  -------------->  Start(allocation)
        ^                            ^                                                 |
        +----------- tell -----------+--------------------  Outcome  <-----------------+

Life of a trial's state, which lives in the memory of a few ranks: the keepers of an evaluation that
finished hold it; the next evaluation gets it from them; then its own keepers hold the newer one and
the others drop theirs. States of trials that cannot be promoted are dropped, except the best
trial's, saved at the end. The cost of a decision does not grow with the number of ended trials.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpihpo.allocation import (
    AllocationPolicy,
    AllocationSettings,
    RankPool,
    Topology,
    build_policy,
    keepers,
)
from mpihpo.errors import AllocationError, InternalError
from mpihpo.records import (
    Allocation,
    Ending,
    Evaluation,
    Objective,
    Outcome,
    RungResult,
    Status,
    TrialRecord,
    best_outcome,
)
from mpihpo.schedule import Propose, Scheduler, ScheduleSettings, build_scheduler

if TYPE_CHECKING:
    from mpihpo.search import Searcher

COMPLETED = "completed"
EVERY_TRIAL_FAILED = "every trial failed"

_ENDED = frozenset({Status.STOPPED, Status.COMPLETED, Status.FAILED})


@dataclass(frozen=True, slots=True)
class Start:
    """The ranks of the allocation form a group and train."""

    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Drop:
    """These world ranks forget what they keep of the trial's state."""

    trial_id: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseRung:
    """A rung is over; comes once per rung."""

    result: RungResult


@dataclass(frozen=True, slots=True)
class Save:
    """This world rank writes the best trial's checkpoint."""

    trial_id: int
    rank: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The experiment is over; always the last instruction."""

    reason: str
    """``completed``, ``every trial failed``, or the reason that ``stop`` was given."""


Instruction = Start | Drop | CloseRung | Save | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a progress display shows."""

    rung: int
    """The highest one that was started."""
    running: tuple[Allocation, ...]
    counts: Mapping[Status, int]
    """Trials by status; a status that no trial has is absent."""
    busy_ranks: int
    ranks: int
    """Training ranks, busy or not."""
    utilisation: float
    """Busy rank-seconds over all rank-seconds, up to the last event."""
    best: Outcome | None


def trial_seed(seed: int, trial_id: int) -> int:
    """The seed of a trial, below 2**31: depends on the experiment's seed and the id only."""
    digest = hashlib.sha256(f"{seed}:{trial_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def build_coordinator(
    *,
    searcher: Searcher,
    trials: int | None,
    schedule: ScheduleSettings,
    allocation: AllocationSettings,
    objective: Objective,
    seed: int,
    topology: Topology,
    training_ranks: Collection[int],
) -> Coordinator:
    """A coordinator with the scheduler and the policy that the settings name.

    Raises:
        ExperimentError: A trial needs more ranks than ``training_ranks`` has.
    """
    factor, ranks = schedule.reduction_factor, len(training_ranks)
    policy = build_policy(allocation, reduction_factor=factor, world_size=ranks)
    return Coordinator(
        searcher=searcher,
        scheduler=lambda propose: build_scheduler(
            schedule, objective=objective, trials=trials, propose=propose
        ),
        policy=policy,
        topology=topology,
        objective=objective,
        seed=seed,
        training_ranks=training_ranks,
    )


class Coordinator:
    """Decides what runs where. Call ``begin`` once, then ``tell`` per outcome, until ``done``.

    Equal outcomes in equal order give equal instructions, whatever the times are.
    """

    def __init__(
        self,
        *,
        searcher: Searcher,
        scheduler: Callable[[Propose], Scheduler],
        policy: AllocationPolicy,
        topology: Topology,
        objective: Objective,
        seed: int,
        training_ranks: Collection[int],
    ) -> None:
        """Ready to begin.

        ``scheduler`` is called once, with the function that draws its trials. ``topology`` covers
        all world ranks, ``training_ranks`` are those that train.
        """
        self._searcher = searcher
        self._policy = policy
        self._topology = topology
        self._objective = objective
        self._seed = seed
        self._pool = RankPool(topology, training_ranks)
        self._proposed = self._closed = self._serial = self._rung = 0
        self._running: dict[int, Allocation] = {}
        self._held: Evaluation | None = None
        self._live: dict[int, Status] = {}  # of trials that have not ended
        self._counts: Counter[Status] = Counter()
        self._kept: dict[int, tuple[int, ...]] = {}  # world ranks that hold a trial's state
        self._best: Outcome | None = None
        self._best_id: int | None = None
        self._stop_reason: str | None = None
        self._begun = self._done = False
        self._t_begin = self._t_last = self._busy_rank_seconds = 0.0
        self._scheduler = scheduler(self._propose)

    @property
    def done(self) -> bool:
        """``Finish`` was given out."""
        return self._done

    @property
    def best(self) -> Outcome | None:
        """The best trial's outcome so far, as ``records.best_outcome`` defines it."""
        return self._best

    def status(self, trial_id: int) -> Status:
        """What became of a trial; pending or parked as long as it waits for ranks."""
        return self._live.get(trial_id) or self._scheduler.status(trial_id)

    def snapshot(self) -> Snapshot:
        """The present state for a display, at a cost of O(running evaluations)."""
        elapsed = (self._t_last - self._t_begin) * self._pool.size
        return Snapshot(
            rung=self._rung,
            running=tuple(self._running.values()),
            counts={status: count for status, count in self._counts.items() if count},
            busy_ranks=self._pool.size - self._pool.free,
            ranks=self._pool.size,
            utilisation=self._busy_rank_seconds / elapsed if elapsed > 0 else 0.0,
            best=self._best,
        )

    def begin(self, now: float) -> list[Instruction]:
        """The first instructions, at ``now`` seconds since the job's start.

        Raises:
            InternalError: Called twice, or after ``stop``.
        """
        if self._begun or self._done:
            raise InternalError("the coordinator was begun twice, or after its end")
        self._begun = True
        self._t_begin = self._t_last = now
        return self._decide([])

    def tell(self, outcome: Outcome, now: float) -> list[Instruction]:
        """Take an outcome, whose ranks are free again, and decide what is next.

        Raises:
            InternalError: No such evaluation is running, it finished without a finite objective,
                or it was interrupted without ``stop``.
        """
        serial = outcome.allocation.serial
        if serial not in self._running:
            problem = "told already" if 0 <= serial < self._serial else "never started"
            raise InternalError(f"outcome of evaluation {serial}, which was {problem}")
        value = outcome.objective
        if outcome.ending is Ending.FINISHED and (value is None or not math.isfinite(value)):
            raise InternalError(f"evaluation {serial} finished with the objective {value}")
        if outcome.ending is Ending.INTERRUPTED and self._stop_reason is None:
            raise InternalError(f"evaluation {serial} was interrupted, but nothing was stopped")
        self._account(now)
        allocation = self._running.pop(serial)
        self._pool.release(allocation.ranks)
        self._searcher.tell(outcome)
        self._scheduler.tell(outcome)
        return self._decide(self._settle(allocation, outcome))

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """Start nothing more; ``Finish`` comes when the running evaluations have ended.

        The first reason counts. After ``Finish`` this does nothing.
        """
        if self._done:
            return []
        if self._stop_reason is None:
            self._stop_reason = reason
        self._account(now)
        return self._decide([])

    def _propose(self) -> TrialRecord | None:
        trial_id = self._proposed
        config = self._searcher.ask(trial_id)
        if config is None:
            return None
        self._proposed += 1
        self._live[trial_id] = Status.PENDING
        self._counts[Status.PENDING] += 1
        return TrialRecord(id=trial_id, config=config, seed=trial_seed(self._seed, trial_id))

    def _decide(self, drops: list[Instruction]) -> list[Instruction]:
        # Asking can close a rung too: that of a searcher that turns out to be exhausted.
        batch = self._pull() if self._stop_reason is None else []
        instructions = [*self._close_rungs(), *drops, *(self._start(batch) if batch else [])]
        if self._running:
            return instructions
        if self._scheduler.done:
            reason = COMPLETED if self._best is not None else EVERY_TRIAL_FAILED
        elif self._stop_reason is not None:
            reason = self._stop_reason
        else:
            name = type(self._scheduler).__name__
            raise InternalError(f"{name} is not done, but nothing runs and nothing starts")
        self._done = True
        if self._best_id is not None:
            instructions.append(Save(self._best_id, self._kept[self._best_id][0]))
        return [*instructions, Finish(reason)]

    def _pull(self) -> list[Evaluation]:
        """Evaluations that start now, the most important first; one that does not fit is held.

        A held one goes first, unless the scheduler has one of a higher rung that fits by now.
        """
        free = self._pool.free
        batch = []
        current, self._held = self._held, None
        was_held = current is not None
        while free:
            current = current or self._scheduler.ask()
            if current is None or self._width(current) > free:
                break
            chosen, current = current, None
            if was_held:
                other = self._scheduler.ask()
                if other and other.rung > chosen.rung and self._width(other) <= free:
                    chosen, current = other, chosen
                else:
                    current, was_held = other, False
            batch.append(chosen)
            free -= self._width(chosen)
        self._held = current
        return batch

    def _width(self, evaluation: Evaluation) -> int:
        width = self._policy.width(evaluation)
        if not 1 <= width <= self._pool.size:
            name, trial_id = type(self._policy).__name__, evaluation.trial.id
            raise AllocationError(
                f"{name} wants {width} of {self._pool.size} ranks for trial {trial_id}"
            )
        return width

    def _start(self, batch: list[Evaluation]) -> list[Start]:
        free = self._pool.free
        widths = self._policy.share(batch, free)
        if len(widths) != len(batch) or min(widths) < 1 or sum(widths) > free:
            name = type(self._policy).__name__
            raise AllocationError(f"{name} shares {free} free ranks among {len(batch)} as {widths}")
        holders = [self._kept.get(evaluation.trial.id, ()) for evaluation in batch]
        placed = self._pool.take_all(list(zip(widths, holders, strict=True)))
        starts = []
        for evaluation, ranks, held_by in zip(batch, placed, holders, strict=True):
            allocation = Allocation(
                serial=self._serial,
                evaluation=evaluation,
                ranks=ranks,
                holders=held_by,
                keepers=keepers(ranks, self._topology),
            )
            self._running[allocation.serial] = allocation
            self._serial += 1
            self._rung = max(self._rung, evaluation.rung)
            self._move(evaluation.trial.id, Status.RUNNING)
            starts.append(Start(allocation))
        return starts

    def _settle(self, allocation: Allocation, outcome: Outcome) -> list[Instruction]:
        """Update who holds what after an outcome, and the best trial."""
        trial_id = allocation.evaluation.trial.id
        drops: list[Instruction] = []
        if outcome.ending is Ending.FINISHED:
            stale = set(self._kept.get(trial_id, ())).difference(allocation.keepers)
            if stale:
                drops.append(Drop(trial_id, tuple(sorted(stale))))
            self._kept[trial_id] = allocation.keepers
            rivals = [outcome] if self._best is None else [self._best, outcome]
            self._best = best_outcome(rivals, self._objective)
            if self._best is outcome:
                beaten, self._best_id = self._best_id, trial_id
                drops += self._forget(beaten)
        self._move(trial_id, self._scheduler.status(trial_id))
        return drops + self._forget(trial_id)

    def _close_rungs(self) -> list[Instruction]:
        results = self._scheduler.results()
        if len(results) == self._closed:
            return []
        instructions: list[Instruction] = [CloseRung(result) for result in results[self._closed :]]
        self._closed = len(results)
        for trial_id, status in list(self._live.items()):
            if status is Status.PARKED and (new := self._scheduler.status(trial_id)) in _ENDED:
                self._move(trial_id, new)
                instructions += self._forget(trial_id)
        return instructions

    def _move(self, trial_id: int, status: Status) -> None:
        self._counts[self._live[trial_id]] -= 1
        self._counts[status] += 1
        if status in _ENDED:
            del self._live[trial_id]
        else:
            self._live[trial_id] = status

    def _forget(self, trial_id: int | None) -> list[Instruction]:
        """Drop the state of a trial that has ended, unless it is the best one."""
        if trial_id in self._live or trial_id not in self._kept or trial_id == self._best_id:
            return []
        return [Drop(trial_id, self._kept.pop(trial_id))]

    def _account(self, now: float) -> None:
        busy = self._pool.size - self._pool.free
        self._busy_rank_seconds += busy * max(0.0, now - self._t_last)
        self._t_last = max(self._t_last, now)
