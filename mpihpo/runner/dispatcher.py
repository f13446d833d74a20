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
from mpihpo.errors import InternalError, TrialTimeout
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
from mpihpo.records import Allocation, Ending, Failure
from mpihpo.runner.orders import (
    Abort,
    Ended,
    Faulted,
    Forget,
    Leave,
    Progressed,
    Saved,
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
_LONGEST_SLEEP_SECONDS = 0.005


class Dispatcher:
    """Drives one coordinator on world rank 0.

    Args:
        world: The world.
        coordinator: Decides.
        recorder: Writes down.
        training_ranks: World ranks that take orders.
        clock: Seconds since the job's start.
        deadline: When the job's time is over, on this clock; None: never.
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
        deadline: float | None = None,
        trial_seconds: float | None = None,
    ) -> None:
        self._world, self._mailbox = world, world.mailbox
        self._coordinator, self._recorder = coordinator, recorder
        self._training_ranks = tuple(training_ranks)
        self._clock = clock
        self._deadline, self._trial_seconds = deadline, trial_seconds
        self._running: dict[int, tuple[Allocation, float]] = {}
        self._timed_out: set[int] = set()
        self._is_stopping = self._is_late = False
        self._awaits_checkpoint = False
        self._saving: set[tuple[int, int]] = set()
        self._saved_early: dict[tuple[int, int], Saved] = {}  # the word came before the outcome
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
        backoff = Backoff(_LONGEST_SLEEP_SECONDS)
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
        except BaseException:  # a searcher may call sys.exit, and the ranks would wait for ever
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
            if self._finish is not None and not self._is_writing and not self.is_over:
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
            self._ended(event, now)
        elif isinstance(event, Saved):
            self._saved(event)
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

    def _saved(self, event: Saved) -> None:
        key = (event.trial_id, event.epoch)
        if key not in self._saving:
            self._saved_early[key] = event
            return
        self._saving.remove(key)
        self._recorder.saved(event.trial_id, event.epoch, event.problem)

    @property
    def _is_writing(self) -> bool:
        return self._awaits_checkpoint or bool(self._saving)

    def _ended(self, event: Ended, now: float) -> None:
        allocation, _ = self._running.pop(event.serial)
        self._timed_out.discard(event.serial)
        outcome = event.outcome(allocation)
        evaluation = allocation.evaluation
        trial_id = evaluation.trial.id
        if outcome.ending is Ending.INTERRUPTED and not (self._is_stopping or self._is_late):
            # Its next epoch would have ended too late; shorter ones of other trials may go on.
            self._is_late = True
            self._recorder.note("stop", f"stopping: {TIME_LIMIT}")
            self._carry_out(self._coordinator.stop(TIME_LIMIT, now))
        instructions = self._coordinator.tell(outcome, now)
        # What is to be forgotten goes first: a rank may soon keep a newer state of the trial.
        if outcome.ending is Ending.FAILED:
            # A keeper may have been done before another member failed.
            self._order(Forget(trial_id, epoch=evaluation.stop), allocation.keepers)
        elif evaluation.start > 0 and outcome.ending is Ending.FINISHED:
            again = set(allocation.holders) & set(allocation.keepers)
            self._order(Forget(trial_id, before=evaluation.stop), again)
        self._send(instructions)  # before anything is written down: the ranks wait
        self._recorder.ended(outcome, now, saving=event.saving)
        if evaluation.start > 0 and outcome.ending is Ending.FINISHED:
            self._recorder.drop(trial_id, before=evaluation.stop)
        if event.saving is not None:
            key = (trial_id, event.saving)
            self._saving.add(key)
            if key in self._saved_early:
                self._saved(self._saved_early.pop(key))
        self._recorder.status(trial_id, self._coordinator.status(trial_id))
        self._record(instructions)

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
        if self._deadline is not None and now >= self._deadline:
            self.stop(TIME_LIMIT)
        if self._trial_seconds is None:
            return
        for serial, (allocation, since) in self._running.items():
            if now - since > self._trial_seconds and serial not in self._timed_out:
                self._timed_out.add(serial)
                failure = Failure(
                    rank=allocation.leader,
                    kind=TrialTimeout.__name__,
                    message=f"took longer than limits.trial_seconds: {self._trial_seconds:g}",
                )
                for rank in allocation.ranks:
                    self._mailbox.post(Abort(serial, failure), rank, Tag.ALERT)

    # Instructions.

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        self._send(instructions)
        self._record(instructions)

    def _send(self, instructions: Sequence[Instruction]) -> None:
        """Give the ranks what they wait for."""
        for instruction in instructions:
            if isinstance(instruction, Start):
                allocation = instruction.allocation
                self._running[allocation.serial] = (allocation, self._clock())
                self._order(Train(allocation), allocation.ranks)
            elif isinstance(instruction, Drop):
                self._order(Forget(instruction.trial_id), instruction.ranks)

    def _record(self, instructions: Sequence[Instruction]) -> None:
        """Write down what was decided, and do what no rank waits for."""
        for instruction in instructions:
            now = self._clock()
            if isinstance(instruction, Start):
                self._recorder.started(instruction.allocation, now)
            elif isinstance(instruction, Drop):
                if instruction.has_ended:
                    self._recorder.drop(instruction.trial_id)
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
        problem = self._recorder.finish(finish.reason, self._clock())
        self._leave(Leave(finish.reason, unwritten=problem))

    def _leave(self, order: Leave) -> None:
        self.is_over = True
        if order.fault is not None:
            for rank in self._training_ranks:
                self._mailbox.post(StopSoon(), rank, Tag.ALERT)
        self._order(order, self._training_ranks)
