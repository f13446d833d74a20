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

Ranks can be lost, and come back: the policy is then built anew for those that are left, and states
that only lost ranks held are read from the disk, or the trial trains again from an earlier epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from mpihpo.agenda import Agenda
from mpihpo.allocation import (
    AllocationPolicy,
    AllocationSettings,
    Lender,
    Request,
    Topology,
    build_policy,
    keepers,
)
from mpihpo.errors import ExperimentError, InternalError
from mpihpo.holdings import Holdings, Promise
from mpihpo.instructions import (
    COMPLETED,
    EVERY_TRIAL_FAILED,
    TIME_LIMIT,
    TOO_FEW_RANKS,
    CloseRung,
    Finish,
    Instruction,
    Notice,
    Save,
    Snapshot,
    Start,
)
from mpihpo.records import Allocation, Ending, Evaluation, Objective, Outcome, Status, best_outcome
from mpihpo.schedule import Propose, Scheduler, ScheduleSettings, build_scheduler

if TYPE_CHECKING:
    from mpihpo.history import History
    from mpihpo.search import Searcher


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
    retries: int = 0,
    deadline: float | None = None,
    state_bytes: int | None = None,
    ranks_can_die: bool = False,
) -> Coordinator:
    """A coordinator with the scheduler and the policy that the settings name.

    Raises:
        ExperimentError: A trial needs more ranks than ``training_ranks`` has.
    """
    factor = schedule.reduction_factor
    return Coordinator(
        searcher=searcher,
        scheduler=lambda propose: build_scheduler(
            schedule, objective=objective, trials=trials, propose=propose
        ),
        policy=lambda ranks: build_policy(allocation, reduction_factor=factor, world_size=ranks),
        topology=topology,
        objective=objective,
        seed=seed,
        training_ranks=training_ranks,
        retries=retries,
        deadline=deadline,
        state_bytes=state_bytes,
        ranks_can_die=ranks_can_die,
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
        policy: Callable[[int], AllocationPolicy],
        topology: Topology,
        objective: Objective,
        seed: int,
        training_ranks: Collection[int],
        retries: int = 0,
        deadline: float | None = None,
        state_bytes: int | None = None,
        ranks_can_die: bool = False,
    ) -> None:
        """Ready to begin, or to `replay` what an earlier job did.

        ``scheduler`` is called once, with the function that draws its trials; ``policy`` with the
        number of ranks that train, whenever it changes. ``topology`` covers all world ranks,
        ``training_ranks`` are those that train. A failed trial is trained again up to ``retries``
        times. No evaluation starts whose first epoch would end after ``deadline``, in seconds since
        the job's start. Kept states take up to ``state_bytes`` in memory and on the disk. Where
        ranks can die alone, a state has a second keeper on one node as well.
        """
        self._ranks_can_die = ranks_can_die
        self._topology = topology
        self._objective = objective
        self._lender = Lender(policy, topology, training_ranks)
        self._pool = self._lender.pool
        self._serial = self._rung = 0
        self._running: dict[int, Allocation] = {}
        self._holdings = Holdings(state_bytes)
        self._best: Outcome | None = None
        self._best_id: int | None = None
        self._stop_reason: str | None = None
        self._due: list[Instruction] = []  # for the next time that instructions are given
        self._begun = self._done = False
        self._agenda = Agenda(
            searcher=searcher,
            scheduler=scheduler,
            seed=seed,
            retries=retries,
            deadline=deadline,
            on_record=lambda outcome: self._settle(outcome, self._holdings.taken_over),
            holdings=self._holdings,
        )

    @property
    def done(self) -> bool:
        """``Finish`` was given out."""
        return self._done

    @property
    def best(self) -> Outcome | None:
        """The best trial's outcome so far, as ``records.best_outcome`` defines it."""
        return self._best

    def epoch_seconds(self, trial_id: int) -> float:
        """What the trial's next epoch is expected to take; 0 if nothing was measured."""
        return self._agenda.epoch_seconds(trial_id)

    def status(self, trial_id: int) -> Status:
        """What became of a trial; pending or parked as long as it waits for ranks."""
        return self._agenda.status(trial_id)

    def snapshot(self) -> Snapshot:
        """The present state for a display, at a cost of O(running evaluations)."""
        return Snapshot(
            rung=self._rung,
            running=tuple(self._running.values()),
            counts=self._agenda.counts,
            busy_ranks=self._lender.busy,
            ranks=self._pool.size,
            utilisation=self._lender.utilisation,
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
        self._lender.begin(now)
        return self._decide(now)

    def replay(self, history: History) -> None:
        """Take over what an earlier job did, before ``begin``; nothing of it is done again.

        The ranks, the limits and the number of trials may differ from those of the earlier job. An
        evaluation that it had started and not ended comes first. Where a trial's state is lost, it
        trains again from the last epoch whose state is there.

        Raises:
            InternalError: Called after ``begin``.
        """
        if self._begun:
            raise InternalError("a coordinator was told to replay after it began")
        self._agenda.replay(history)
        serials = (
            step.allocation.serial if isinstance(step, Outcome) else step.serial
            for step in history.steps
        )
        self._serial = max(serials, default=-1) + 1

    def tell(
        self, outcome: Outcome, now: float, *, lost: Collection[int] = ()
    ) -> list[Instruction]:
        """Take an outcome, whose ranks are free again but for lost ones, and decide what next.

        ``lost`` may name ranks that are known to be lost, and such as had no part in it.

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
        self._lender.account(now)
        allocation = self._running.pop(serial)
        self._holdings.ends(allocation.evaluation.trial.id)
        gone = {*lost, *(rank for rank in allocation.ranks if rank not in self._pool)}
        self._pool.release(rank for rank in allocation.ranks if rank not in gone)
        if self._agenda.tell(outcome):
            self._settle(outcome, self._holdings.keep)
        if gone:
            self._lose(gone)
        return self._decide(now)

    def lose(self, ranks: Collection[int], now: float) -> list[Instruction]:
        """Ranks are lost; decide what is next. Where one trains, the outcome is still to be told.

        Raises:
            InternalError: One never trained.
        """
        self._lender.account(now)
        self._lose(ranks)
        return [] if self._done else self._decide(now)

    def readmit(self, rank: int, now: float) -> list[Instruction]:
        """A lost rank is back, and free; decide what is next.

        Raises:
            InternalError: It was not lost, or the evaluation that it was lost from still runs.
        """
        if any(rank in allocation.ranks for allocation in self._running.values()):
            raise InternalError(f"rank {rank} is back, but its evaluation has not ended")
        self._lender.account(now)
        self._pool.readmit(rank)
        self._renew_policy()
        return [] if self._done else self._decide(now)

    def saved(self, trial_id: int, epoch: int, size: int | None) -> list[Instruction]:
        """A trial's state after an epoch is on the disk, where it takes ``size`` bytes.

        To be told after the outcome; None says that it could not be written.
        """
        if not self._agenda.is_live(trial_id) and trial_id != self._best_id:
            return []
        self._holdings.saved(trial_id, epoch, size)
        return [] if self._done else self._holdings.make_room(self._best_id)

    def _lose(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._pool.retire(rank)
        self._due += self._holdings.lose(ranks)
        self._renew_policy()

    def _renew_policy(self) -> None:
        """For the ranks that there are now; with too few only what runs goes on, to its end."""
        try:
            self._lender.renew_policy()
        except ExperimentError as error:
            if self._stop_reason is None and not self._agenda.scheduler.done:
                self._stop_reason = TOO_FEW_RANKS
                self._due.append(Notice(f"nothing more is started: {TOO_FEW_RANKS}: {error}"))

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """Start nothing more; ``Finish`` comes when the running evaluations have ended.

        The first reason counts. After ``Finish`` this does nothing.
        """
        if self._done:
            return []
        if self._stop_reason is None:
            self._stop_reason = reason
        self._lender.account(now)
        return self._decide(now)

    def _decide(self, now: float) -> list[Instruction]:
        batch: list[Evaluation] = []
        if self._stop_reason is None:
            batch = self._agenda.pull(self._pool.free, self._width, now)
            if self._agenda.is_out_of_time:
                self._stop_reason = TIME_LIMIT
                self._due.append(Notice(f"nothing more is started: {TIME_LIMIT}"))
        # Asking can close a rung too: that of a searcher that turns out to be exhausted.
        instructions = self._close_rungs()
        started = self._start(batch) if batch else []
        self._due += self._holdings.make_room(self._best_id)
        instructions += [*self._due, *started]
        self._due = []
        if self._running:
            return instructions
        if self._agenda.scheduler.done:
            reason = COMPLETED if self._best is not None else EVERY_TRIAL_FAILED
        elif self._stop_reason is not None:
            reason = self._stop_reason
        else:
            name = type(self._agenda.scheduler).__name__
            raise InternalError(f"{name} is not done, but nothing runs and nothing starts")
        self._done = True
        if self._best is not None:
            instructions += self._save(self._best)
        return [*instructions, Finish(reason)]

    def _save(self, best: Outcome) -> list[Instruction]:
        evaluation = best.allocation.evaluation
        trial_id, stop = evaluation.trial.id, evaluation.stop
        ranks = self._holdings.holders(trial_id)
        if not ranks and self._holdings.newest_saved(trial_id, stop) == stop:
            ranks = self._pool.ranks  # on the disk only, where any rank can read it
        if ranks:
            return [Save(trial_id, ranks[0])]
        return [Notice(f"trial {trial_id}, the best one: its state after epoch {stop} is lost")]

    def _width(self, evaluation: Evaluation) -> int:
        return self._lender.width(self._request(evaluation))

    def _request(self, evaluation: Evaluation) -> Request:
        trial_id = evaluation.trial.id
        least = self._agenda.least_width(trial_id)
        return Request(evaluation, least, self._holdings.holders(trial_id))

    def _start(self, batch: list[Evaluation]) -> list[Start]:
        requests = [self._request(self._startable(evaluation)) for evaluation in batch]
        starts = []
        for request, ranks in zip(requests, self._lender.lend(requests), strict=True):
            evaluation = request.evaluation
            allocation = Allocation(
                serial=self._serial,
                evaluation=evaluation,
                ranks=ranks,
                holders=request.holders if evaluation.start else (),
                keepers=keepers(ranks, self._topology, always_two=self._ranks_can_die),
            )
            self._running[allocation.serial] = allocation
            self._serial += 1
            self._rung = max(self._rung, evaluation.rung)
            self._agenda.started(evaluation)
            self._holdings.starts(evaluation.trial.id, len(allocation.keepers))
            starts.append(Start(allocation))
        return starts

    def _startable(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation, from an earlier epoch where the state of its start is lost."""
        trial_id, start = evaluation.trial.id, evaluation.start
        if not start or self._holdings.holders(trial_id):
            return evaluation
        first = self._holdings.newest_saved(trial_id, start)
        if first < start:
            text = f"its state after epoch {start} is lost; it trains again from epoch {first + 1}"
            self._due.append(Notice(f"trial {trial_id}: {text}"))
        return replace(evaluation, start=first)

    def _settle(
        self, outcome: Outcome, take: Callable[[Outcome, Promise], list[Instruction]]
    ) -> None:
        """After an outcome: ``take`` says who holds the state now; and the best trial."""
        evaluation = outcome.allocation.evaluation
        trial_id, key = evaluation.trial.id, self._objective.key(outcome.objective)
        if outcome.ending is Ending.FINISHED:
            self._due += take(outcome, (-evaluation.stop, key, trial_id))
            self._improve(outcome)
        self._forget(trial_id)

    def _improve(self, outcome: Outcome) -> None:
        rivals = [outcome] if self._best is None else [self._best, outcome]
        self._best = best_outcome(rivals, self._objective)
        if self._best is outcome:
            beaten, self._best_id = self._best_id, outcome.allocation.evaluation.trial.id
            self._forget(beaten)

    def _close_rungs(self) -> list[Instruction]:
        closed, ended = self._agenda.close_rungs()
        for trial_id in ended:
            self._forget(trial_id)
        return [CloseRung(result) for result in closed]

    def _forget(self, trial_id: int | None) -> None:
        """Drop the state of a trial that has ended, unless it is the best one."""
        if trial_id is None or trial_id == self._best_id or self._agenda.is_live(trial_id):
            return
        self._due += self._holdings.forget(trial_id)
