"""The agenda: which evaluations come next, in the order in which they should start.

It stands between the coordinator, which gives ranks away, and the scheduler and searcher, which
know of no failures and no restarts. The scheduler is told once how each evaluation that it handed
out ended: a failed one that is tried again is not told yet, one that an earlier job did is told
from the record and never starts.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mpihpo.allocation.pace import Pace
from mpihpo.errors import CheckpointError, LossElsewhere, Overdue, RankLost
from mpihpo.records import Ending, Evaluation, Outcome, RungResult, Status, TrialRecord, reached
from mpihpo.schedule import Propose, Scheduler

if TYPE_CHECKING:
    from mpihpo.history import History
    from mpihpo.holdings import Holdings
    from mpihpo.search import Searcher

OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
"""Names of errors after which a trial is given more ranks."""
LOST_STATE = CheckpointError.__name__
"""Name of the error of a trial whose saved state cannot be read."""
NOT_ITS_FAULT = frozenset({RankLost.__name__, Overdue.__name__, KeyboardInterrupt.__name__})
"""Names of errors that a trial is forgiven once: it was stopped, or a rank of it has died."""
ELSEWHERE = LossElsewhere.__name__
"""Name of the error of a trial that another trial's lost rank has hit: always forgiven."""

_ENDED = frozenset({Status.STOPPED, Status.COMPLETED, Status.FAILED})


def trial_seed(seed: int, trial_id: int) -> int:
    """The seed of a trial, below 2**31: depends on the experiment's seed and the id only."""
    digest = hashlib.sha256(f"{seed}:{trial_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Agenda:
    """Pure: equal calls in equal order give equal answers.

    Args:
        searcher: Proposes configurations.
        scheduler: Called once, with the function that draws its trials.
        seed: The experiment's.
        retries: How often a failed evaluation of a trial is started again.
        deadline: No evaluation starts whose first epoch would end later, in seconds since the
            job's start; None: no limit.
        on_record: Called with each outcome that is taken from the record of an earlier job.
        holdings: Is told of saved states that cannot be read.
    """

    def __init__(
        self,
        *,
        searcher: Searcher,
        scheduler: Callable[[Propose], Scheduler],
        seed: int,
        retries: int,
        deadline: float | None,
        on_record: Callable[[Outcome], None],
        holdings: Holdings,
    ) -> None:
        self._searcher, self._seed = searcher, seed
        self._retries, self._deadline = retries, deadline
        self._on_record = on_record
        self._holdings = holdings
        self._pace = Pace()
        self._proposed = self._closed = 0
        self._held: Evaluation | None = None
        self._again: deque[Evaluation] = deque()  # handed out before, to be started once more
        self._failures: Counter[int] = Counter()
        self._forgiven: set[int] = set()
        self._least: dict[int, int] = {}  # ranks that a trial needs since it ran out of memory
        self._live: dict[int, Status] = {}  # of trials that have not ended
        self._counts: Counter[Status] = Counter()
        self._known: Mapping[int, TrialRecord] = {}
        self._recorded: dict[tuple[int, int], Outcome] = {}
        self.is_out_of_time = False
        """Something could have started, but would not have ended an epoch in time."""
        self.scheduler = scheduler(self._propose)

    # Trials.

    def _propose(self) -> TrialRecord | None:
        trial_id = self._proposed
        config = self._searcher.ask(trial_id)
        if config is None:
            return None
        self._proposed += 1
        self._live[trial_id] = Status.PENDING
        self._counts[Status.PENDING] += 1
        # A trial on record keeps its configuration, whatever the searcher would say today.
        new = TrialRecord(id=trial_id, config=config, seed=trial_seed(self._seed, trial_id))
        return self._known.get(trial_id, new)

    def status(self, trial_id: int) -> Status:
        """What became of a trial; pending or parked as long as it waits for ranks."""
        if trial_id >= self._proposed:  # of an earlier job, and not drawn again so far
            return Status.PENDING
        return self._live.get(trial_id) or self.scheduler.status(trial_id)

    def is_live(self, trial_id: int) -> bool:
        """Whether a trial has not ended."""
        return trial_id in self._live

    @property
    def counts(self) -> Mapping[Status, int]:
        """Trials by status; a status that no trial has is absent."""
        return {status: count for status, count in self._counts.items() if count}

    def least_width(self, trial_id: int) -> int:
        """Ranks without which the trial does not fit into memory, as far as is known."""
        return self._least.get(trial_id, 1)

    def _move(self, trial_id: int, status: Status) -> None:
        self._counts[self._live[trial_id]] -= 1
        self._counts[status] += 1
        if status in _ENDED:
            del self._live[trial_id]
        else:
            self._live[trial_id] = status

    # What is next.

    def pull(self, free: int, width: Callable[[Evaluation], int], now: float) -> list[Evaluation]:
        """Evaluations that start now, the most important first; one that does not fit is held.

        What is to be done again goes first. Then a held one, unless the scheduler has one of a
        higher rung that fits by now.

        Args:
            free: Free ranks.
            width: Ranks that an evaluation needs.
            now: Seconds since the job's start.
        """
        batch: list[Evaluation] = []
        while self._again and free:
            if width(self._again[0]) > free or not self._in_time(self._again[0], now):
                return batch
            batch.append(self._again.popleft())
            free -= width(batch[-1])
        current, self._held = self._held, None
        was_held = current is not None
        while free:
            current = current or self._ask()
            if current is None or width(current) > free or not self._in_time(current, now):
                break
            chosen, current = current, None
            if was_held:
                other = self._ask()
                if (
                    other is not None
                    and other.rung > chosen.rung
                    and width(other) <= free
                    and self._in_time(other, now)
                ):
                    chosen, current = other, chosen
                else:
                    current, was_held = other, False
            batch.append(chosen)
            free -= width(chosen)
        self._held = current
        return batch

    def _in_time(self, evaluation: Evaluation, now: float) -> bool:
        if self._deadline is None:
            return True
        ends = now + self._pace.epoch_seconds(evaluation.trial.id)
        self.is_out_of_time = self.is_out_of_time or ends > self._deadline
        return ends <= self._deadline

    def _ask(self) -> Evaluation | None:
        """The scheduler's next evaluation that is not on record."""
        while (evaluation := self.scheduler.ask()) is not None:
            outcome = self._recorded.pop(_key(evaluation), None)
            if outcome is None:
                return evaluation
            self._absorb(outcome)
        return None

    def epoch_seconds(self, trial_id: int) -> float:
        """What the trial's next epoch is expected to take; 0 if nothing was measured."""
        return self._pace.epoch_seconds(trial_id)

    def started(self, evaluation: Evaluation) -> None:
        """An evaluation was given its ranks."""
        self._move(evaluation.trial.id, Status.RUNNING)

    # What came out.

    def tell(self, outcome: Outcome) -> bool:
        """Take an outcome; returns False if its evaluation is started again."""
        self._pace.learn(outcome)
        if not self._is_tried_again(outcome):
            self._pass_on(outcome)
            return True
        evaluation = outcome.allocation.evaluation
        self._again.append(evaluation)
        self._move(evaluation.trial.id, Status.PARKED if evaluation.start else Status.PENDING)
        return False

    def _pass_on(self, outcome: Outcome) -> None:
        trial_id = outcome.allocation.evaluation.trial.id
        self._searcher.tell(outcome)
        self.scheduler.tell(outcome)
        self._move(trial_id, self.scheduler.status(trial_id))

    def _is_tried_again(self, outcome: Outcome) -> bool:
        """Whether its evaluation is to be started once more; counts what failed."""
        failure, allocation = outcome.failure, outcome.allocation
        trial_id, start = allocation.evaluation.trial.id, allocation.evaluation.start
        if outcome.ending is not Ending.FAILED or failure is None:
            return False
        # A fault of the disk, not of the trial; torch has an error of this name as well.
        if failure.kind == LOST_STATE and start and not allocation.holders:
            self._holdings.unreadable(trial_id, start)
        elif failure.kind in NOT_ITS_FAULT and trial_id not in self._forgiven:
            self._forgiven.add(trial_id)  # a second time the trial may be what kills ranks
        elif failure.kind != ELSEWHERE:
            self._failures[trial_id] += 1
            if self._failures[trial_id] > self._retries:
                return False
        if failure.kind in OUT_OF_MEMORY:
            self._least[trial_id] = 2 * len(allocation.ranks)
        return True

    def close_rungs(self) -> tuple[list[RungResult], list[int]]:
        """Rungs closed since the last call, and the trials that ended with them."""
        results = self.scheduler.results()
        new, self._closed = list(results[self._closed :]), len(results)
        ended = []
        if new:
            for trial_id, status in list(self._live.items()):
                now = self.scheduler.status(trial_id) if status is Status.PARKED else status
                if now in _ENDED:
                    self._move(trial_id, now)
                    ended.append(trial_id)
        return new, ended

    # An earlier job.

    def replay(self, history: History) -> None:
        """Take over what an earlier job did; see ``Coordinator.replay``."""
        self._known = history.trials
        self._holdings.replay(history.saved)
        out: dict[tuple[int, int], Evaluation] = {}
        for step in history.steps:
            if not isinstance(step, Outcome):
                self._hand_out(_key(step.evaluation), out)
                continue
            key = _key(step.allocation.evaluation)
            if step.ending is Ending.INTERRUPTED:
                if key in out and reached(step) > out[key].start:
                    out[key] = replace(out[key], start=reached(step))
            elif self._is_tried_again(step):
                continue
            elif key in out:
                del out[key]
                self._absorb(step)
            else:
                self._recorded[key] = step  # of a rung that further trials have opened again
        self._again.extend(sorted(out.values(), key=lambda evaluation: -evaluation.rung))

    def _hand_out(self, key: tuple[int, int], out: dict[tuple[int, int], Evaluation]) -> None:
        """Ask the scheduler as the earlier job did, until it hands ``key`` out."""
        while key not in out and (evaluation := self._ask()) is not None:
            out[_key(evaluation)] = evaluation

    def _absorb(self, outcome: Outcome) -> None:
        self._pace.learn(outcome)
        self._pass_on(outcome)
        self._on_record(outcome)


def _key(evaluation: Evaluation) -> tuple[int, int]:
    return evaluation.trial.id, evaluation.rung
