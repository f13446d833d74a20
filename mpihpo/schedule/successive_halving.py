"""Schedulers with closed rungs: ``successive_halving``, and ``none`` with a single rung.

A rung closes when each of its trials has finished or failed, and only then is anybody promoted.
Promotions therefore depend on the objectives alone and not on the order in which they arrived, so
an experiment gives the same result on any number of ranks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mpihpo.errors import InternalError
from mpihpo.records import (
    Ending,
    Evaluation,
    Objective,
    Outcome,
    RungPlan,
    RungResult,
    Status,
    TrialRecord,
)
from mpihpo.schedule.protocol import Propose
from mpihpo.schedule.rungs import planned_ladder, promotions, rung_stops

if TYPE_CHECKING:
    from mpihpo.schedule.settings import ScheduleSettings


class SuccessiveHalving:
    """Trains all trials to the first rung, the best of them to the second, and so on.

    Of a rung planned for n trials the n // reduction_factor best go on, at least one while any
    finished. Equal objectives go to the lower trial id. A failed trial never goes on; a rung that
    is short of finished trials promotes those it has. ``ask`` and ``tell`` cost O(1), closing a
    rung of n trials O(n log n).
    """

    def __init__(
        self,
        *,
        settings: ScheduleSettings,
        objective: Objective,
        trials: int | None,
        propose: Propose,
    ) -> None:
        """See ``mpihpo.schedule.protocol.Scheduler``."""
        self._stops = self.stops(settings)
        self._reduction_factor = settings.reduction_factor
        self._objective = objective
        self._propose = propose
        self._trials = trials
        self._status: dict[int, Status] = {}
        self._results: tuple[RungResult, ...] = ()
        self._done = False
        self._rung = 0
        self._planned = 0
        self._is_open = True  # further trials may join the rung
        self._promoted: deque[TrialRecord] = deque()
        self._out: set[int] = set()
        self._finished: list[tuple[TrialRecord, float | None]] = []
        self._failed = 0
        self._interrupted = 0

    @classmethod
    def stops(cls, settings: ScheduleSettings) -> tuple[int, ...]:
        """Completed epochs at the end of each rung."""
        return rung_stops(settings.min_epochs, settings.max_epochs, settings.reduction_factor)

    @classmethod
    def ladder(cls, settings: ScheduleSettings, trials: int) -> tuple[RungPlan, ...]:
        """The rungs as planned, for ``trials`` trials of which none fails."""
        return planned_ladder(cls.stops(settings), trials, settings.reduction_factor)

    @property
    def done(self) -> bool:
        """The last rung is closed, or no trial is left to go on."""
        return self._done

    def results(self) -> tuple[RungResult, ...]:
        """The rungs closed so far, lowest first."""
        return self._results

    def status(self, trial_id: int) -> Status:
        """What became of a trial; one that was handed out counts as running."""
        return self._status[trial_id]

    def ask(self) -> Evaluation | None:
        """The next evaluation of the open rung: new trials by id, promoted ones best first."""
        if self._is_open:
            trial = self._draw()
            if trial is not None:
                return self._hand_out(trial)
        if self._promoted:
            return self._hand_out(self._promoted.popleft())
        return None

    def tell(self, outcome: Outcome) -> None:
        """Take the outcome of an evaluation that was handed out.

        An interrupted trial is parked where it was, and its rung stays open.

        Raises:
            InternalError: No such evaluation is out.
        """
        evaluation = outcome.allocation.evaluation
        trial = evaluation.trial
        if trial.id not in self._out or evaluation.rung != self._rung:
            raise InternalError(
                f"outcome of trial {trial.id} at rung {evaluation.rung}, which is not running"
            )
        self._out.remove(trial.id)
        if outcome.ending is Ending.FINISHED:
            self._finished.append((trial, outcome.objective))
            is_last = self._rung == len(self._stops) - 1
            self._status[trial.id] = Status.COMPLETED if is_last else Status.PARKED
        elif outcome.ending is Ending.FAILED:
            self._failed += 1
            self._status[trial.id] = Status.FAILED
        else:
            self._interrupted += 1
            self._status[trial.id] = Status.PARKED
        self._close_rung_when_over()

    def _draw(self) -> TrialRecord | None:
        trial = self._propose()
        if trial is None:
            self._is_open = False
            self._close_rung_when_over()
            return None
        self._planned += 1
        self._is_open = self._planned != self._trials
        return trial

    def _hand_out(self, trial: TrialRecord) -> Evaluation:
        self._status[trial.id] = Status.RUNNING
        self._out.add(trial.id)
        start = self._stops[self._rung - 1] if self._rung else 0
        return Evaluation(trial=trial, rung=self._rung, start=start, stop=self._stops[self._rung])

    def _close_rung_when_over(self) -> None:
        if self._is_open or self._promoted or self._out or self._interrupted:
            return
        ranking = sorted(
            self._finished, key=lambda entry: (self._objective.key(entry[1]), entry[0].id)
        )
        is_last = self._rung == len(self._stops) - 1
        places = 0 if is_last else promotions(self._planned, self._reduction_factor)
        promoted = [trial for trial, _ in ranking[:places]]
        if ranking or self._failed:
            result = RungResult(
                rung=self._rung,
                start=self._stops[self._rung - 1] if self._rung else 0,
                stop=self._stops[self._rung],
                evaluated=len(ranking) + self._failed,
                failed=self._failed,
                promoted=tuple(trial.id for trial in promoted),
                best=ranking[0][1] if ranking else None,
            )
            self._results = (*self._results, result)
        if not promoted:
            self._done = True
            return
        for trial, _ in ranking[places:]:
            self._status[trial.id] = Status.STOPPED
        self._promoted = deque(promoted)
        self._finished = []
        self._failed = 0
        self._planned = places
        self._rung += 1


class NoHalving(SuccessiveHalving):
    """Trains every trial from 0 to ``max_epochs`` in one rung."""

    @classmethod
    def stops(cls, settings: ScheduleSettings) -> tuple[int, ...]:
        """Completed epochs at the end of the only rung."""
        return (settings.max_epochs,)
