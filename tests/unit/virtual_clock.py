"""Drives a coordinator on a virtual clock; checks instructions against a model of memory."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from mpihpo.allocation import AllocationSettings, Topology
from mpihpo.coordinator import Coordinator, build_coordinator
from mpihpo.instructions import CloseRung, Drop, Finish, Instruction, Notice, Save, Start
from mpihpo.records import (
    Allocation,
    Config,
    Ending,
    Evaluation,
    Failure,
    Objective,
    Outcome,
    Report,
    RungResult,
    Status,
    TrialRecord,
)
from mpihpo.schedule import ScheduleSettings

Step = Allocation | Outcome

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


def sizes(saved: Mapping[int, frozenset[int]]) -> dict[int, dict[int, int]]:
    """The states of these epochs, of one byte each."""
    return {trial_id: dict.fromkeys(epochs, 1) for trial_id, epochs in saved.items()}


def ended(
    work: Evaluation | Allocation,
    value: float | str | None = None,
    ending: Ending = Ending.FINISHED,
    *,
    reports: tuple[Report, ...] = (),
    state_bytes: int | None = None,
) -> Outcome:
    """The outcome of an evaluation: finished with a value, failed with a kind, or interrupted."""
    if isinstance(work, Evaluation):
        work = Allocation(serial=0, evaluation=work, ranks=(0,))
    kind = value if isinstance(value, str) else "ValueError"
    failure = Failure(rank=work.leader, kind=kind, message="bad configuration")
    return Outcome(
        allocation=work,
        ending=ending,
        reports=reports,
        objective=value if not isinstance(value, str) and ending is Ending.FINISHED else None,
        failure=failure if ending is Ending.FAILED else None,
        state_bytes=state_bytes,
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
    retries: int = 0,
    deadline: float | None = None,
    state_bytes: int | None = None,
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
        retries=retries,
        deadline=deadline,
        state_bytes=state_bytes,
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
    """What a driven coordinator did, and what the ranks would remember.

    Everything that happens is checked: busy and lost ranks are not given away, holders hold what
    they are said to, and where there is none the disk has it. With ``budget`` all states together
    stay within it from when the first one's size is known.
    """

    coordinator: Coordinator
    value: Callable[[Evaluation], float | str | None]
    """The objective; None: the evaluation fails; text: with an error of this name."""
    seconds: Callable[[Allocation], float] = unit
    state_bytes: int | None = None
    """Size of every trial's state; 0: there is none; None: nobody knows."""
    save_seconds: Callable[[Outcome], float] | None = None
    """From an outcome to when its state is on the disk, and the coordinator is told so; None: it is
    there at once, and the coordinator is told of the outcome only."""
    budget: int | None = None
    """What the states may take in memory, and on the disk."""
    now: float = 0.0
    log: list[Instruction] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    memory: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """World rank to trial to the epoch of the kept state."""
    disk: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Trial to the epochs whose state is on the disk."""
    steps: list[tuple[Step, dict[int, frozenset[int]]]] = field(default_factory=list)
    """As a journal has them: starts and outcomes, each with what was on the disk just then."""
    idle: list[tuple[int, int]] = field(default_factory=list)
    """After each decision: idle ranks, and the evaluations started so far."""
    lost: set[int] = field(default_factory=set)
    peak: tuple[int, int] = (0, 0)
    """The most bytes in memory and on the disk at once."""
    _events: list[tuple[float, int, Allocation]] = field(default_factory=list)
    _writing: list[tuple[float, int, Outcome]] = field(default_factory=list)
    _allowed: tuple[float, float] = (math.inf, math.inf)
    _left: dict[int, int] = field(default_factory=dict)
    _durations: dict[int, float] = field(default_factory=dict)
    _busy: set[int] = field(default_factory=set)

    def drive(self, outcomes: int | None = None) -> Run:
        """Run to the end, or for so many outcomes."""
        if not self.log:
            self.obey(self.coordinator.begin(self.now))
        while self._events and outcomes != 0:
            if self._writing and self._writing[0] < self._events[0]:
                self._land()
                continue
            self.now, _, allocation = heapq.heappop(self._events)
            value = self.value(allocation.evaluation)
            has_failed = value is None or isinstance(value, str)
            self.tell(allocation, value, Ending.FAILED if has_failed else Ending.FINISHED)
            outcomes = None if outcomes is None else outcomes - 1
        assert self.coordinator.done or outcomes == 0
        while self._writing and (self.coordinator.done or self._writing[0][0] <= self.now):
            self._land()
        return self

    @property
    def running(self) -> list[Allocation]:
        return [allocation for _, _, allocation in sorted(self._events)]

    def lose(self, ranks: Collection[int], kind: str = "RankLost", *, at_once: bool = False) -> Run:
        """Ranks are lost: their evaluations fail with this kind of error, one after the other.

        With ``at_once`` the coordinator is told of all of them before it is told of any outcome.
        """
        hit = [each for each in self.running if set(ranks).intersection(each.ranks)]
        gone = set(ranks).difference(*(each.ranks for each in hit))
        if gone or at_once:
            gone = set(ranks) if at_once else gone
            self.lost |= gone
            self._busy -= gone
            self.obey(self.coordinator.lose(sorted(gone), self.now))
        for allocation in hit:
            self._events = [each for each in self._events if each[2] is not allocation]
            heapq.heapify(self._events)
            self.tell(
                allocation, kind, Ending.FAILED, lost=set(ranks).intersection(allocation.ranks)
            )
        assert not any(self.memory[rank] for rank in ranks)
        return self

    def readmit(self, rank: int) -> Run:
        self.lost.remove(rank)
        self.obey(self.coordinator.readmit(rank, self.now))
        return self

    def interrupt(
        self,
        reason: str,
        reached: Callable[[Evaluation], int] = lambda evaluation: evaluation.start,
    ) -> Run:
        """Stop, and interrupt everything that runs, each after its epoch ``reached``."""
        self.obey(self.coordinator.stop(reason, self.now))
        for allocation in self.running:
            self.tell(allocation, None, Ending.INTERRUPTED, reached(allocation.evaluation))
        return self

    def tell(
        self,
        allocation: Allocation,
        value: float | str | None,
        ending: Ending,
        reached: int | None = None,
        *,
        lost: Collection[int] = (),
    ) -> None:
        evaluation = allocation.evaluation
        trial_id = evaluation.trial.id
        last = evaluation.stop if reached is None else reached
        pace = self._durations.pop(allocation.serial) / (evaluation.stop - evaluation.start)
        reports = tuple(
            Report(epoch, {}, pace * (epoch - evaluation.start))
            for epoch in range(evaluation.start + 1, last + 1)
            if ending is not Ending.FAILED
        )
        self._busy.difference_update(allocation.ranks)
        self.lost.update(lost)
        if ending is Ending.FINISHED:
            for rank in allocation.keepers:
                self.memory[rank][trial_id] = evaluation.stop
        outcome = ended(allocation, value, ending, reports=reports, state_bytes=self.state_bytes)
        self.outcomes.append(outcome)
        # Where nothing is attached nothing is saved, and any epoch can be gone on from.
        is_there = self.save_seconds is None or self.state_bytes == 0
        if reports and is_there:
            self.disk[trial_id].add(last)
        self._note(outcome)
        if reports and is_there:
            self._outdate(outcome, last)
        elif reports:
            assert self.save_seconds is not None
            entry = (self.now + self.save_seconds(outcome), allocation.serial, outcome)
            heapq.heappush(self._writing, entry)
        self._measure()
        self.obey(self.coordinator.tell(outcome, self.now, lost=lost))

    def _land(self) -> None:
        """A state appears on the disk."""
        self.now, _, outcome = heapq.heappop(self._writing)
        trial_id, epoch = outcome.allocation.evaluation.trial.id, outcome.reports[-1].epoch
        if self._is_wanted(
            trial_id
        ):  # else its deletion was ordered already, and happens as soon as it can
            self.disk[trial_id].add(epoch)
            self._outdate(outcome, epoch)
        self._measure()
        assert self.state_bytes is not None
        self.obey(self.coordinator.saved(trial_id, epoch, self.state_bytes))

    def _is_wanted(self, trial_id: int) -> bool:
        """Its state may be needed: it has not ended, or is the best."""
        best = self.coordinator.best
        is_best = best is not None and best.allocation.evaluation.trial.id == trial_id
        ended = (Status.STOPPED, Status.COMPLETED, Status.FAILED)
        return is_best or self.coordinator.status(trial_id) not in ended

    def _outdate(self, outcome: Outcome, epoch: int) -> None:
        """States older than one that a finished evaluation has left are deleted."""
        trial_id = outcome.allocation.evaluation.trial.id
        if outcome.ending is Ending.FINISHED:
            self._left[trial_id] = max(epoch, self._left.get(trial_id, 0))
        newest = self._left.get(trial_id, 0)
        self.disk[trial_id] = {each for each in self.disk[trial_id] if each >= newest}

    def _measure(self) -> tuple[int, int]:
        """What all states take in memory and on the disk: what they may, or less."""
        if self.state_bytes is None:
            return 0, 0
        size = self.state_bytes
        memory = size * sum(map(len, self.memory.values()))
        disk = size * sum(map(len, self.disk.values()))
        assert memory <= self._allowed[0]
        assert disk <= self._allowed[1]
        self.peak = max(self.peak[0], memory), max(self.peak[1], disk)
        return memory, disk

    def _allow(self) -> None:
        """With what is still to come states stay within the budget, or what must stay is more."""
        memory, disk = self._measure()
        is_known = any(outcome.ending is Ending.FINISHED for outcome in self.outcomes)
        if self.budget is None or self.coordinator.done or not is_known:
            return
        size, best = self.state_bytes or 0, self.coordinator.best
        coming = size * sum(len(each.keepers) for each in self.running)
        written = [each.allocation.evaluation.trial.id for _, _, each in self._writing]
        writing = [trial_id for trial_id in written if self._is_wanted(trial_id)]
        landing = size * (len(self._events) + len(writing))
        needed = {each.evaluation.trial.id for each in self.running}
        if best is not None:
            needed.add(best.allocation.evaluation.trial.id)
        held = size * sum(self.remembered().get(trial_id, 0) for trial_id in needed)
        filed = size * sum(len(self.disk.get(trial_id, ())) for trial_id in needed.union(writing))
        self._allowed = max(self.budget, coming + held), max(self.budget, landing + filed)
        assert memory + coming <= self._allowed[0]
        assert disk + landing <= self._allowed[1]

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert not any(isinstance(earlier, Finish) for earlier in self.log)
            self.log.append(instruction)
            if isinstance(instruction, Start):
                self._start(instruction.allocation)
            elif isinstance(instruction, Drop):
                assert instruction.ranks or instruction.has_ended or instruction.from_disk
                if instruction.from_disk:  # would take with it what is just being written
                    written = [each for _, _, each in self._writing]
                    assert not any(
                        each.allocation.evaluation.trial.id == instruction.trial_id
                        for each in written
                    )
                    assert self.disk[instruction.trial_id]
                if instruction.has_ended or instruction.from_disk:
                    self.disk.pop(instruction.trial_id, None)
                for rank in instruction.ranks:
                    del self.memory[rank][instruction.trial_id]
            elif isinstance(instruction, Save):
                best = self.coordinator.best
                assert best is not None
                assert instruction.rank not in self.lost
                assert best.allocation.evaluation.trial.id == instruction.trial_id
                held = self.memory[instruction.rank].get(instruction.trial_id)
                stop = best.allocation.evaluation.stop
                assert held == stop or (held is None and stop in self.disk[instruction.trial_id])
        self._allow()
        snapshot = self.coordinator.snapshot()
        assert snapshot.busy_ranks == len(self._busy)
        assert snapshot.utilisation <= 1.0
        assert len(snapshot.running) == snapshot.counts.get(Status.RUNNING, 0)
        self.idle.append((snapshot.ranks - snapshot.busy_ranks, len(self.starts)))

    def _start(self, allocation: Allocation) -> None:
        assert allocation.ranks
        assert len(set(allocation.ranks)) == len(allocation.ranks)
        assert not self._busy.intersection(allocation.ranks)
        assert not self.lost.intersection((*allocation.ranks, *allocation.holders))
        self._busy.update(allocation.ranks)
        evaluation = allocation.evaluation
        if evaluation.start and not allocation.holders:
            assert evaluation.start in self.disk[evaluation.trial.id]
        assert evaluation.start or not allocation.holders
        for rank in allocation.holders:
            assert self.memory[rank][evaluation.trial.id] == evaluation.start
        assert allocation.keepers[0] == allocation.leader
        assert set(allocation.keepers) <= set(allocation.ranks)
        seconds = self._durations[allocation.serial] = self.seconds(allocation)
        event = (self.now + seconds, allocation.serial, allocation)
        heapq.heappush(self._events, event)
        self._note(allocation)

    def _note(self, step: Step) -> None:
        on_disk = {trial_id: frozenset(epochs) for trial_id, epochs in self.disk.items() if epochs}
        self.steps.append((step, on_disk))

    @property
    def starts(self) -> list[Allocation]:
        return [entry.allocation for entry in self.log if isinstance(entry, Start)]

    @property
    def rungs(self) -> list[RungResult]:
        return [entry.result for entry in self.log if isinstance(entry, CloseRung)]

    @property
    def notices(self) -> list[str]:
        return [entry.text for entry in self.log if isinstance(entry, Notice)]

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
