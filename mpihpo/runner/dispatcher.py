"""The dispatcher: carries instructions to the ranks, and their events to the coordinator."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import Backoff
from mpihpo.coordinator import Coordinator
from mpihpo.errors import InternalError
from mpihpo.instructions import (
    TIME_LIMIT,
    CloseRung,
    Drop,
    Finish,
    Instruction,
    Notice,
    Save,
    Start,
)
from mpihpo.records import Allocation, Ending, Failure, Outcome
from mpihpo.runner.orders import (
    Abort,
    Ended,
    Faulted,
    Forget,
    Leave,
    Progressed,
    Signalled,
    StopSoon,
    Train,
    WriteCheckpoint,
    Written,
)
from mpihpo.runner.recorder import Recorder

if TYPE_CHECKING:
    from mpihpo.comm.world import World

_TICK_SECONDS = 0.2


class Dispatcher:
    """Drives one coordinator on world rank 0.

    Args:
        world: The world.
        coordinator: Decides.
        recorder: Writes down.
        training_ranks: World ranks that take orders.
        clock: Seconds since the job's start.
        time_seconds: Stop the job after this long.
        trial_seconds: Fail an evaluation after this long.
    """

    def __init__(
        self,
        world: World,
        coordinator: Coordinator,
        recorder: Recorder,
        *,
        training_ranks: Sequence[int],
        clock: Callable[[], float],
        time_seconds: float | None = None,
        trial_seconds: float | None = None,
    ) -> None:
        self._world, self._mailbox = world, world.mailbox
        self._coordinator, self._recorder = coordinator, recorder
        self._training_ranks = tuple(training_ranks)
        self._clock = clock
        self._time_seconds, self._trial_seconds = time_seconds, trial_seconds
        self._running: dict[int, tuple[Allocation, float]] = {}
        self._timed_out: set[int] = set()
        self._is_stopping = False
        self._awaits_checkpoint = False
        self._finish: Finish | None = None
        self._next_tick = 0.0
        self._is_stepping = False
        self.is_over = False
        """Every rank was told to leave."""

    def begin(self) -> None:
        """Hand out the first orders; local."""
        with self._faults_told():
            self._carry_out(self._coordinator.begin(self._clock()))

    def run(self) -> None:
        """Serve until the experiment is over; for a thread or a rank of its own."""
        backoff = Backoff()
        while not self.is_over:
            if self.step():
                backoff.reset()
            else:
                backoff.pause()

    @contextmanager
    def _faults_told(self) -> Iterator[None]:
        """A fault in here ends the job: every rank, this one too, is told and raises it."""
        try:
            yield
        except Exception:
            self._leave(Leave("fault", traceback.format_exc()))

    def step(self) -> bool:
        """Serve what has arrived; local, never waits. Returns whether anything had."""
        if self.is_over or self._is_stepping:
            return False
        self._is_stepping = True
        arrived = False
        with self._faults_told():
            while not self.is_over and (mail := self._mailbox.take(Tag.EVENT)) is not None:
                arrived = True
                self._take(mail[1])
            now = self._clock()
            if now >= self._next_tick:
                self._next_tick = now + _TICK_SECONDS
                self._recorder.tick(now)
                self._watch_limits(now)
            if self._finish is not None and not self._awaits_checkpoint and not self.is_over:
                self._end(self._finish)
        self._is_stepping = False
        return arrived

    def start_thread(self) -> threading.Thread:
        """Serve in a thread beside this rank's training."""
        thread = threading.Thread(target=self.run, name="mpihpo dispatcher", daemon=True)
        thread.start()
        return thread

    # Events.

    def _take(self, event: object) -> None:
        now = self._clock()
        if isinstance(event, Ended):
            self._ended(event.outcome, now)
        elif isinstance(event, Progressed):
            self._recorder.reported(event.trial_id, event.report, now)
        elif isinstance(event, Signalled):
            self.stop(event.signal)
        elif isinstance(event, Faulted):
            self._recorder.note("fault", f"rank {event.rank}: {event.traceback}")
            self._leave(Leave("fault", f"rank {event.rank}:\n{event.traceback}"))
        elif isinstance(event, Written):
            self._awaits_checkpoint = False
            if event.problem is not None:
                self._recorder.note(
                    "checkpoint", f"no checkpoint of the best trial: {event.problem}"
                )
        else:
            raise InternalError(f"the dispatcher was sent {event!r}")

    def _ended(self, outcome: Outcome, now: float) -> None:
        allocation = outcome.allocation
        evaluation = allocation.evaluation
        self._running.pop(allocation.serial, None)
        self._timed_out.discard(allocation.serial)
        self._recorder.ended(outcome, now)
        if evaluation.start > 0 and outcome.ending is Ending.FINISHED:
            again = set(allocation.holders) & set(allocation.keepers)
            self._order(Forget(evaluation.trial.id, before=evaluation.stop), again)
        elif outcome.ending is Ending.FAILED:
            # A keeper may have been done before another member failed.
            self._order(Forget(evaluation.trial.id, epoch=evaluation.stop), allocation.keepers)
        instructions = self._coordinator.tell(outcome, now)
        self._recorder.status(evaluation.trial.id, self._coordinator.status(evaluation.trial.id))
        self._carry_out(instructions)

    def stop(self, reason: str) -> None:
        """Start nothing more and leave every trial at the end of its epoch; local."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._recorder.note("stop", f"stopping: {reason}")
        for rank in self._training_ranks:
            self._mailbox.post(StopSoon(), rank, Tag.ALERT)
        self._carry_out(self._coordinator.stop(reason, self._clock()))

    def _watch_limits(self, now: float) -> None:
        if self._time_seconds is not None and now >= self._time_seconds:
            self.stop(TIME_LIMIT)
        if self._trial_seconds is None:
            return
        for serial, (allocation, since) in self._running.items():
            if now - since > self._trial_seconds and serial not in self._timed_out:
                self._timed_out.add(serial)
                failure = Failure(
                    rank=allocation.leader,
                    kind="TrialTimeout",
                    message=f"took longer than limits.trial_seconds: {self._trial_seconds:g}",
                )
                for rank in allocation.ranks:
                    self._mailbox.post(Abort(serial, failure), rank, Tag.ALERT)

    # Instructions.

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            now = self._clock()
            if isinstance(instruction, Start):
                allocation = instruction.allocation
                self._running[allocation.serial] = (allocation, now)
                self._order(Train(allocation), allocation.ranks)
                self._recorder.started(allocation, now)
            elif isinstance(instruction, Drop):
                self._order(Forget(instruction.trial_id), instruction.ranks)
            elif isinstance(instruction, CloseRung):
                self._close_rung(instruction, now)
            elif isinstance(instruction, Save):
                best = self._coordinator.best
                assert best is not None
                self._awaits_checkpoint = True
                self._order(WriteCheckpoint(best), [instruction.rank])
            elif isinstance(instruction, Notice):
                self._recorder.note("notice", instruction.text)
            else:
                self._finish = instruction

    def _close_rung(self, instruction: CloseRung, now: float) -> None:
        for trial_id in self._recorder.trial_ids:
            self._recorder.status(trial_id, self._coordinator.status(trial_id))
        self._recorder.rung_closed(instruction.result, now)

    def _order(self, order: object, ranks: Sequence[int] | set[int]) -> None:
        for rank in ranks:
            self._mailbox.post(order, rank, Tag.ORDER)

    def _end(self, finish: Finish) -> None:
        for trial_id in self._recorder.trial_ids:
            self._recorder.status(trial_id, self._coordinator.status(trial_id))
        self._recorder.finish(finish.reason, self._clock())
        self._leave(Leave(finish.reason))

    def _leave(self, order: Leave) -> None:
        self.is_over = True
        if order.fault is not None:
            for rank in self._training_ranks:
                self._mailbox.post(StopSoon(), rank, Tag.ALERT)
        self._order(order, self._training_ranks)
