"""Drives a coordinator on a virtual clock; checks instructions against a model of memory."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mpihpo.allocation import AllocationSettings, Topology
from mpihpo.coordinator import Coordinator, build_coordinator
from mpihpo.instructions import CloseRung, Drop, Finish, Instruction, Save, Start
from mpihpo.records import (
    Allocation,
    Config,
    Ending,
    Evaluation,
    Failure,
    Objective,
    Outcome,
    RungResult,
    Status,
    TrialRecord,
)
from mpihpo.schedule import ScheduleSettings

LOSS = Objective(metric="loss")


class ListSearcher:
    """Proposes ``{"x": 0}``, ``{"x": 1}``, ... and remembers what it was told."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.told: list[Outcome] = []

    def ask(self, trial_id: int) -> Config | None:
        return {"x": trial_id} if trial_id < self.size else None

    def tell(self, outcome: Outcome) -> None:
        self.told.append(outcome)


def trial(trial_id: int) -> TrialRecord:
    return TrialRecord(id=trial_id, config={"x": trial_id}, seed=trial_id)


def evaluation(trial_id: int, rung: int = 0, start: int = 0, stop: int = 1) -> Evaluation:
    return Evaluation(trial=trial(trial_id), rung=rung, start=start, stop=stop)


def ended(
    work: Evaluation | Allocation, value: float | None = None, ending: Ending = Ending.FINISHED
) -> Outcome:
    """The outcome of an evaluation: finished with a value, or failed, or interrupted."""
    if isinstance(work, Evaluation):
        work = Allocation(serial=0, evaluation=work, ranks=(0,))
    failure = Failure(rank=work.leader, kind="ValueError", message="bad configuration")
    return Outcome(
        allocation=work,
        ending=ending,
        objective=value if ending is Ending.FINISHED else None,
        failure=failure if ending is Ending.FAILED else None,
    )


def make(
    trials: int,
    *,
    world: int | Topology = 4,
    factor: int = 2,
    epochs: tuple[int, int] = (1, 8),
    scheduler: str = "successive_halving",
    objective: Objective = LOSS,
    training_ranks: Collection[int] | None = None,
    searcher: ListSearcher | None = None,
    limit: int | None = -1,
    **allocation: object,
) -> Coordinator:
    """A coordinator; ``limit`` is what the scheduler is told of the number of trials."""
    topology = Topology.even(world) if isinstance(world, int) else world
    return build_coordinator(
        searcher=searcher or ListSearcher(trials),
        trials=trials if limit == -1 else limit,
        schedule=ScheduleSettings(
            scheduler=scheduler,
            reduction_factor=factor,
            min_epochs=epochs[0],
            max_epochs=epochs[1],
        ),
        allocation=AllocationSettings(**allocation),  # type: ignore[arg-type]
        objective=objective,
        seed=17,
        topology=topology,
        training_ranks=range(topology.size) if training_ranks is None else training_ranks,
    )


def unit(allocation: Allocation) -> float:
    """Every evaluation takes the same time."""
    return 1.0


def jitter(seed: int) -> Callable[[Allocation], float]:
    """Random durations: the order of the outcomes varies with the seed."""
    rng = random.Random(seed)
    return lambda allocation: rng.uniform(0.1, 2.0)


@dataclass
class Run:
    """What a driven coordinator did, and what the ranks would remember."""

    coordinator: Coordinator
    value: Callable[[Evaluation], float | None]
    """The objective; None: the evaluation fails."""
    seconds: Callable[[Allocation], float] = unit
    now: float = 0.0
    log: list[Instruction] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    memory: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """World rank to trial to the epoch of the kept state."""
    idle: list[tuple[int, int]] = field(default_factory=list)
    """After each decision: idle ranks, and the evaluations started so far."""
    _events: list[tuple[float, int, Allocation]] = field(default_factory=list)
    _busy: set[int] = field(default_factory=set)

    def drive(self, outcomes: int | None = None) -> Run:
        """Run to the end, or for so many outcomes."""
        if not self.log:
            self.obey(self.coordinator.begin(self.now))
        while self._events and outcomes != 0:
            self.now, _, allocation = heapq.heappop(self._events)
            value = self.value(allocation.evaluation)
            self.tell(allocation, value, Ending.FAILED if value is None else Ending.FINISHED)
            outcomes = None if outcomes is None else outcomes - 1
        assert self.coordinator.done or outcomes == 0
        return self

    def interrupt(self, reason: str) -> Run:
        """Stop, and interrupt everything that runs."""
        self.obey(self.coordinator.stop(reason, self.now))
        for _, _, allocation in sorted(self._events):
            self.tell(allocation, None, Ending.INTERRUPTED)
        return self

    def tell(self, allocation: Allocation, value: float | None, ending: Ending) -> None:
        trial_id = allocation.evaluation.trial.id
        self._busy.difference_update(allocation.ranks)
        if ending is Ending.FINISHED:
            for rank in allocation.keepers:
                self.memory[rank][trial_id] = allocation.evaluation.stop
        outcome = ended(allocation, value, ending)
        self.outcomes.append(outcome)
        self.obey(self.coordinator.tell(outcome, self.now))

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert not any(isinstance(earlier, Finish) for earlier in self.log)
            self.log.append(instruction)
            if isinstance(instruction, Start):
                self._start(instruction.allocation)
            elif isinstance(instruction, Drop):
                assert instruction.ranks
                for rank in instruction.ranks:
                    del self.memory[rank][instruction.trial_id]
            elif isinstance(instruction, Save):
                best = self.coordinator.best
                assert best is not None
                assert best.allocation.evaluation.trial.id == instruction.trial_id
                held = self.memory[instruction.rank][instruction.trial_id]
                assert held == best.allocation.evaluation.stop
        snapshot = self.coordinator.snapshot()
        assert snapshot.busy_ranks == len(self._busy)
        assert len(snapshot.running) == snapshot.counts.get(Status.RUNNING, 0)
        self.idle.append((snapshot.ranks - snapshot.busy_ranks, len(self.starts)))

    def _start(self, allocation: Allocation) -> None:
        assert allocation.ranks
        assert len(set(allocation.ranks)) == len(allocation.ranks)
        assert not self._busy.intersection(allocation.ranks)
        self._busy.update(allocation.ranks)
        evaluation = allocation.evaluation
        assert bool(allocation.holders) == bool(evaluation.start)
        for rank in allocation.holders:
            assert self.memory[rank][evaluation.trial.id] == evaluation.start
        assert allocation.keepers[0] == allocation.leader
        assert set(allocation.keepers) <= set(allocation.ranks)
        event = (self.now + self.seconds(allocation), allocation.serial, allocation)
        heapq.heappush(self._events, event)

    @property
    def starts(self) -> list[Allocation]:
        return [entry.allocation for entry in self.log if isinstance(entry, Start)]

    @property
    def rungs(self) -> list[RungResult]:
        return [entry.result for entry in self.log if isinstance(entry, CloseRung)]

    @property
    def reason(self) -> str:
        last = self.log[-1]
        assert isinstance(last, Finish)
        return last.reason

    def placed(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Rung, trial and ranks of every evaluation, in the order of their start."""
        return [(a.evaluation.rung, a.evaluation.trial.id, a.ranks) for a in self.starts]

    def remembered(self) -> dict[int, int]:
        """How many ranks remember each trial."""
        return dict(Counter(trial for states in self.memory.values() for trial in states))
