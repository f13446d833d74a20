"""The dispatcher: carries instructions to the ranks, and their events to the coordinator."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import Backoff
from mpihpo.coordinator import Coordinator
from mpihpo.errors import InternalError, RankLost
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
from mpihpo.results.encoding import name_ranks
from mpihpo.runner.orders import (
    Abort,
    Beat,
    Died,
    Ended,
    Failing,
    Faulted,
    Forget,
    GivenUp,
    Leave,
    Progressed,
    Saved,
    Signalled,
    Stacks,
    StopSoon,
    TellStacks,
    Through,
    Train,
    WriteCheckpoint,
    Written,
)
from mpihpo.runner.recorder import Recorder
from mpihpo.runner.roster import Roster
from mpihpo.runner.standing import merged
from mpihpo.runner.watch import BEATS, GiveUp, Release, Verdict, Watch
from mpihpo.runner.writes import Writes

if TYPE_CHECKING:
    from mpihpo.comm.world import World
    from mpihpo.limits import Limits

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
        limits: How long to wait for what.
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
        limits: Limits,
    ) -> None:
        self._world, self._mailbox = world, world.mailbox
        self._coordinator, self._recorder = coordinator, recorder
        self._training_ranks = tuple(training_ranks)
        self._clock = clock
        self._is_room_short = limits.state_bytes is not None
        self._deadline, self._grace_seconds = deadline, limits.grace_seconds
        # Where no thread of a rank's own may call MPI, a rank that trains is silent.
        heartbeat = limits.heartbeat_seconds if world.threads_may_call else None
        self._watch = Watch(
            trial_seconds=limits.trial_seconds,
            grace_seconds=limits.grace_seconds,
            heartbeat_seconds=heartbeat,
        )
        beat_seconds = None if heartbeat is None else heartbeat / BEATS
        self._roster = Roster(self._mailbox, self._training_ranks, beat_seconds)
        self._running: dict[int, tuple[Allocation, float]] = {}
        self._releases: list[Release] = []
        self._stacks: dict[int, dict[int, str]] = {}  # by serial and rank
        self._is_stopping = self._is_late = False
        self._writes = Writes()
        self._finish: Finish | None = None
        self._next_tick = 0.0
        self._is_stepping = False
        self.farewell: Leave | None = None
        """What every rank was told at the end."""

    @property
    def _lost(self) -> set[int]:
        return self._roster.lost

    def begin(self) -> None:
        """Hand out the first orders; local."""
        with self._faults_told():
            self._carry_out(self._coordinator.begin(self._clock()))

    def run(self) -> None:
        """Serve until every rank is told to leave; for a thread or a rank of its own."""
        backoff = Backoff(_LONGEST_SLEEP_SECONDS)
        while self.farewell is None:
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
        if self.farewell is not None or self._is_stepping:
            return False
        self._is_stepping = True
        arrived = False
        with self._faults_told():
            while self.farewell is None and (mail := self._mailbox.take(Tag.EVENT)) is not None:
                arrived = True
                self._take(*mail)
            now = self._clock()
            if now >= self._next_tick:
                self._next_tick = now + _TICK_SECONDS
                self._recorder.tick(now)
                self._look_after(now)
            if self._finish is not None and not self._writes.are_pending and self.farewell is None:
                self._end(self._finish)
        self._is_stepping = False
        return arrived

    # Events.

    def _take(self, rank: int, event: object) -> None:
        now = self._clock()
        if isinstance(event, Ended):
            self._ended(event, now)
        elif isinstance(event, Beat):
            self._watch.beat(rank, event.serial, event.waits_in, now)
        elif isinstance(event, Saved):
            if rank not in self._lost and self._writes.saved(event):
                self._saved(event)
        elif isinstance(event, Progressed):
            self._recorder.reported(event.trial_id, event.report, now)
        elif isinstance(event, Signalled):
            self.stop(event.signal)
        elif isinstance(event, Faulted):
            self._recorder.note("fault", f"rank {event.rank}: {event.traceback}")
            self._leave(Leave("fault", f"rank {event.rank}:\n{event.traceback}"))
        elif isinstance(event, Died):
            self._note_deaths([event.rank], now)
        elif isinstance(event, Failing):
            self._watch.failing(event.serial, event.failure, now)
        elif isinstance(event, Through):
            if self._watch.through(rank, event.serial) and rank not in self._world.dead:
                self._back(rank, now)
        elif isinstance(event, Stacks):
            if event.serial in self._running:
                self._stacks.setdefault(event.serial, {})[rank] = event.text
        elif isinstance(event, Written):
            self._writes.checkpoint_written()
            if event.problem is not None:
                self._recorder.note(
                    "checkpoint", f"no checkpoint of the best trial: {event.problem}"
                )
        else:
            raise InternalError(f"the dispatcher was sent {event!r}")

    def _saved(self, event: Saved) -> None:
        self._recorder.saved(event.trial_id, event.epoch, event.problem)
        size = event.size if event.problem is None else None
        self._carry_out(self._coordinator.saved(event.trial_id, event.epoch, size))

    def _ended(self, event: Ended, now: float) -> None:
        if not self._watch.is_running(event.serial):
            return  # given up before, and its leader is back
        self._watch.ended(event.serial)
        outcome = event.outcome(self._running[event.serial][0])
        self._settle(outcome, now, saving=event.saving)

    def _settle(
        self,
        outcome: Outcome,
        now: float,
        *,
        saving: int | None = None,
        lost: Collection[int] = (),
    ) -> None:
        """Take the outcome of a running evaluation; all its ranks but ``lost`` ones are free."""
        allocation = outcome.allocation
        del self._running[allocation.serial]
        self._tell_stacks(allocation)
        evaluation = allocation.evaluation
        trial_id = evaluation.trial.id
        if outcome.ending is Ending.INTERRUPTED and not (self._is_stopping or self._is_late):
            # Its next epoch would have ended too late; shorter ones of other trials may go on.
            self._is_late = True
            self._recorder.note("stop", f"stopping: {TIME_LIMIT}")
            self._carry_out(self._coordinator.stop(TIME_LIMIT, now))
        instructions = self._coordinator.tell(outcome, now, lost=lost)
        # What is to be forgotten goes first: a rank may soon keep a newer state of the trial.
        if outcome.ending is Ending.FAILED:
            # A keeper may have been done before another member failed.
            self._order(Forget(trial_id, epoch=evaluation.stop), allocation.keepers)
        elif evaluation.start > 0 and outcome.ending is Ending.FINISHED:
            again = set(allocation.holders) & set(allocation.keepers)
            self._order(Forget(trial_id, before=evaluation.stop), again)
        self._send(instructions)  # before anything is written down: the ranks wait
        self._recorder.ended(outcome, now, saving=saving)
        if evaluation.start > 0 and outcome.ending is Ending.FINISHED:
            self._recorder.drop(trial_id, before=evaluation.stop)
        if saving is not None:
            word = self._writes.expect(trial_id, saving, allocation.leader)
            if word is not None:
                self._saved(word)
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

    # Time goes on.

    def _look_after(self, now: float) -> None:
        """See to what must happen although no event came."""
        if self._deadline is not None and now >= self._deadline:
            self.stop(TIME_LIMIT)
            for serial, (allocation, since) in self._running.items():
                trial_id = allocation.evaluation.trial.id
                epoch = self._coordinator.epoch_seconds(trial_id) or self._deadline - since
                if now > self._deadline + epoch + self._grace_seconds:
                    self._watch.overdue(serial, now)
        self._roster.beat(now)
        self._release()
        self._note_deaths(self._world.dead, now)
        for verdict in self._watch.due(now, self._world.dead):
            self._enforce(verdict, now)

    def _note_deaths(self, ranks: Collection[int], now: float) -> None:
        if died := set(ranks).difference(self._lost):
            self._lose(died, f"{name_ranks(died)} died")
            self._carry_out(self._coordinator.lose(died, now))

    def _enforce(self, verdict: Verdict, now: float) -> None:
        allocation = verdict.allocation
        if isinstance(verdict, GiveUp):
            self._give_up(verdict, now)
        elif isinstance(verdict, Release):
            if verdict.failure.kind != RankLost.__name__:
                self._ask_stacks(allocation.serial, allocation.ranks)
            self._releases.append(verdict)
        else:
            self._ask_stacks(allocation.serial, verdict.ranks)

    def _release(self) -> None:
        """Abort what was asked for its stacks at the last tick: the first to leave free others."""
        releases, self._releases = self._releases, []
        for verdict in releases:
            allocation = verdict.allocation
            for rank in allocation.ranks:
                self._mailbox.post(Abort(allocation.serial, verdict.failure), rank, Tag.ALERT)

    def _ask_stacks(self, serial: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._mailbox.post(TellStacks(serial), rank, Tag.ALERT)

    def _give_up(self, verdict: GiveUp, now: float) -> None:
        """Go on without ranks that did not leave an evaluation, or have died in it."""
        allocation, failure = verdict.allocation, verdict.failure
        serial, trial_id = allocation.serial, allocation.evaluation.trial.id
        if stuck := set(verdict.ranks).difference(self._lost):
            what = f"{name_ranks(stuck)} {'are' if len(stuck) > 1 else 'is'} set aside"
            self._lose(stuck, f"trial {trial_id} failed ({failure.kind}) and {what}")
        self._mailbox.post(GivenUp(serial), allocation.leader, Tag.ALERT)
        outcome = Outcome(
            allocation=allocation,
            ending=Ending.FAILED,
            failure=failure,
            t_start=self._running[serial][1],
            t_stop=now,
        )
        self._settle(outcome, now, lost=verdict.ranks)

    def _lose(self, ranks: Collection[int], text: str) -> None:
        """Note that ranks are lost; nobody waits for anything from them any more."""
        self._roster.lose(ranks)
        self._recorder.note("lost", f"{text}; {self._roster.left} ranks are left")
        saving, has_checkpoint = self._writes.lose(ranks)
        for trial_id, epoch in saving:
            self._saved(Saved(trial_id, epoch, "the rank that wrote it is lost"))
        if has_checkpoint:
            text = "no checkpoint of the best trial: the rank that wrote it is lost"
            self._recorder.note("checkpoint", text)

    def _back(self, rank: int, now: float) -> None:
        """A rank that was set aside has left its evaluation after all."""
        self._roster.back(rank)
        self._recorder.note("back", f"rank {rank} is back")
        self._carry_out(self._coordinator.readmit(rank, now))

    def _tell_stacks(self, allocation: Allocation) -> None:
        if stacks := self._stacks.pop(allocation.serial, None):
            trial_id = allocation.evaluation.trial.id
            self._recorder.note("stacks", f"trial {trial_id} stood at:\n{merged(stacks)}")

    # Instructions.

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        self._send(instructions)
        self._record(instructions)

    def _send(self, instructions: Sequence[Instruction]) -> None:
        """Give the ranks what they wait for."""
        for instruction in instructions:
            if isinstance(instruction, Start):
                allocation = instruction.allocation
                now = self._clock()
                self._running[allocation.serial] = (allocation, now)
                self._watch.started(allocation, now)
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
                if instruction.from_disk or (instruction.has_ended and self._is_room_short):
                    self._recorder.evict(instruction.trial_id)
            elif isinstance(instruction, CloseRung):
                self._close_rung(instruction, now)
            elif isinstance(instruction, Save):
                best = self._coordinator.best
                assert best is not None
                self._writes.expect_checkpoint(instruction.rank)
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
        lost = self._lost | self._world.dead
        order = self.farewell = replace(order, lost=tuple(sorted(lost)))
        if order.fault is not None:
            # Nobody is left to release the members of a trial, one of which may be stuck.
            failure = Failure(
                rank=self._world.rank, kind=InternalError.__name__, message="the job failed"
            )
            for serial, (allocation, _) in self._running.items():
                for rank in allocation.ranks:
                    self._mailbox.post(Abort(serial, failure), rank, Tag.ALERT)
                self._mailbox.post(GivenUp(serial), allocation.leader, Tag.ALERT)
        self._order(order, self._training_ranks)
