"""The worker of a rank: takes orders, trains, and says how it went."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpihpo.comm.devices import place_on_node
from mpihpo.comm.group import Group
from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import GroupAborted, InternalError, TrialInterrupted
from mpihpo.experiment import Experiment
from mpihpo.records import Allocation, Ending, Failure, Outcome, Report, Spent
from mpihpo.runner.agent import Agent
from mpihpo.runner.batch import plan_batch
from mpihpo.runner.checkpoint import write_checkpoint
from mpihpo.runner.handover import receive_state
from mpihpo.runner.orders import (
    Abort,
    Ended,
    EpochVerdict,
    Faulted,
    Forget,
    Leave,
    MemberEnd,
    Progressed,
    SendState,
    Train,
    WriteCheckpoint,
    Written,
)
from mpihpo.runner.recorder import CHECKPOINTS
from mpihpo.runner.saved_state import read_state, state_path
from mpihpo.runner.saver import Saver
from mpihpo.runner.state import Keeper, KeptState
from mpihpo.runner.trial import Trial

if TYPE_CHECKING:
    from mpihpo.comm.world import World

_CAUSE_WAIT_SECONDS = 0.5  # for the word of the member that failed first
_REPORT_INTERVAL_SECONDS = 0.5  # a report less is no loss: the outcome carries them all


@dataclass(slots=True)
class _Course:
    """How one evaluation goes on this rank."""

    spent: Spent = field(default_factory=Spent)
    reports: list[Report] = field(default_factory=list)
    failure: Failure | None = None
    failed_at: float = 0.0
    is_consequence: bool = False
    is_interrupted: bool = False
    state: KeptState | None = None
    """On the leader: for the disk, once every member has come through."""


class Worker:
    """Carries out the orders of one rank.

    Args:
        world: The world.
        experiment: The experiment.
        train: The training function.
        backend: Of the trials' process groups; None for none.
        device: This rank's device.
        directory: The run's folder; None where nothing is written.
        keeper: The states this rank keeps.
        agent: This rank's agent.
        saver: Writes states to disk.
        clock: Seconds since the job's start.
        deadline: Leave training functions at the last epoch that ends before; None: no limit.
    """

    def __init__(
        self,
        *,
        world: World,
        experiment: Experiment,
        train: Callable[[Any, Trial], object],
        backend: str | None,
        device: Any,
        directory: Path | None,
        keeper: Keeper,
        agent: Agent,
        saver: Saver,
        clock: Callable[[], float],
        deadline: float | None = None,
    ) -> None:
        self._world, self._mailbox = world, world.mailbox
        self._experiment, self._train = experiment, train
        self._backend, self._device, self._directory = backend, device, directory
        self._keeper, self._agent, self._saver = keeper, agent, saver
        self._clock, self._deadline = clock, deadline
        training = experiment.training_range(world.size)
        self._local_rank, _ = place_on_node(world.node_of, world.rank, training)
        self._cache: dict[str, Any] = {}
        self._last_progress = 0.0

    def run(self) -> Leave:
        """Take orders until told to leave; local, but for what the orders ask.

        A fault of the runtime on this rank is told to the dispatcher, which tells every rank to
        leave, this one too: so none waits for another one that is gone.
        """
        try:
            return self._take_orders()
        except BaseException:
            event = Faulted(self._world.rank, traceback.format_exc())
            self._mailbox.post(event, 0, Tag.EVENT)
            while not isinstance(order := self._next_order(), Leave):
                continue
            return order

    def _take_orders(self) -> Leave:
        while True:
            order = self._next_order()
            if isinstance(order, Train):
                self._evaluate(order.allocation)
            elif isinstance(order, Forget):
                self._keeper.forget(order.trial_id, before=order.before, epoch=order.epoch)
            elif isinstance(order, WriteCheckpoint):
                self._write(order.outcome)
            elif isinstance(order, Leave):
                return order
            else:
                raise InternalError(f"rank {self._world.rank} was given {order!r}")

    def _next_order(self) -> object:
        found: list[Any] = []

        def arrived() -> bool:
            mail = self._mailbox.take(Tag.ORDER)
            if mail is not None:
                found.append(mail[1])
            return mail is not None

        wait_until(arrived, check=self._world.serve)
        return found[0]

    def _write(self, outcome: Outcome) -> None:
        evaluation = outcome.allocation.evaluation
        event = Written(None)
        if self._directory is not None:
            folder = self._directory / CHECKPOINTS
            try:
                state = self._keeper.get(evaluation.trial.id, evaluation.stop)
                name = evaluation.trial.id, evaluation.stop
                if state is None and state_path(folder, *name).exists():  # of an earlier job
                    state = read_state(folder, *name)
                if state is not None and state.parts:
                    event = Written(str(write_checkpoint(folder, state, outcome)))
            except Exception as error:  # a full disk must not lose the results
                event = Written(None, f"{type(error).__name__}: {error}")
        self._mailbox.post(event, 0, Tag.EVENT)

    # One evaluation.

    def _evaluate(self, allocation: Allocation) -> None:
        t_start = self._clock()
        group = Group(self._world, allocation.serial, allocation.ranks, self._backend)
        self._agent.watch(group)
        course = _Course()
        try:
            self._in_group(allocation, group, course)
        except BaseException as error:
            self._fail(group, course, error)
            # The frames hold the model, and with it the process group, whose sockets must close.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = error.__cause__ = None
        began = time.perf_counter()
        if course.failure is None:
            try:
                group.free()
            except (Exception, GroupAborted) as error:
                self._fail(group, course, error)
        if course.failure is not None:
            group.abort()
            _give_memory_back()
        freed = time.perf_counter() - began
        course.spent = replace(course.spent, resplit=course.spent.resplit + freed)
        if group.rank == 0:
            self._report_end(allocation, group, course, t_start)
        else:
            end = MemberEnd(
                group.serial,
                course.spent,
                course.failure,
                course.is_interrupted,
                course.failed_at,
                course.is_consequence,
            )
            self._mailbox.post(end, allocation.leader, Tag.MEMBER)
        self._agent.watch(None)

    def _in_group(self, allocation: Allocation, group: Group, course: _Course) -> None:
        """Build, restore, train and keep; raises whatever goes wrong."""
        evaluation = allocation.evaluation
        began = time.perf_counter()
        group.build()
        built = time.perf_counter()
        course.spent = Spent(resplit=built - began)
        kept = self._kept_state(allocation, group)
        trial = self._trial(allocation, group, course, kept)
        fetched = time.perf_counter()
        try:
            self._train(dict(evaluation.trial.config), trial)
            trial._finish()
            group.check()
        except TrialInterrupted:  # in the middle of an epoch, whose state nobody can use
            trial._is_interrupted, trial._completed = True, trial.start
        finally:
            trained = time.perf_counter()
            restore = fetched - built + trial._restore_seconds
            course.spent = Spent(
                resplit=built - began, restore=restore, train=trained - built - restore
            )
        course.is_interrupted = trial._is_interrupted
        if self._world.rank in allocation.keepers and trial._completed > trial.start:
            state = trial._take_state()
            if not trial._is_interrupted:
                self._keeper.put(state)
            if group.rank == 0 and self._saver.wants(state):
                course.state = state
            course.spent = replace(course.spent, save=time.perf_counter() - trained)

    def _kept_state(self, allocation: Allocation, group: Group) -> KeptState | None:
        """The state to start from: kept here, or fetched by the leader if no member keeps it."""
        evaluation = allocation.evaluation
        if evaluation.start == 0:
            return None
        trial_id, epoch = evaluation.trial.id, evaluation.start
        kept = self._keeper.get(trial_id, epoch)
        if not allocation.holders:  # of an earlier job: on the disk
            assert self._directory is not None
            folder = self._directory / CHECKPOINTS
            # A trial that attaches nothing has no file; one that does fails when it attaches.
            if group.rank == 0 and state_path(folder, trial_id, epoch).exists():
                kept = read_state(folder, trial_id, epoch)
        elif group.rank == 0 and not set(allocation.holders) & set(allocation.ranks):
            holder = allocation.holders[0]
            self._mailbox.post(SendState(trial_id, epoch), holder, Tag.ALERT)
            kept = receive_state(self._mailbox, holder, group.check)
        return kept

    def _trial(
        self, allocation: Allocation, group: Group, course: _Course, kept: KeptState | None
    ) -> Trial:
        evaluation = allocation.evaluation
        directory = self._directory
        if directory is not None:
            directory = directory / "trials" / str(evaluation.trial.id)
        return Trial(
            allocation=allocation,
            group=group,
            objective=self._experiment.objective,
            batch=plan_batch(
                self._experiment.batch,
                first_width=self._experiment.allocation.ranks,
                world_size=group.size,
            ),
            device=self._device,
            local_rank=self._local_rank,
            directory=directory,
            arguments=self._experiment.arguments,
            cache=self._cache,
            kept=kept,
            is_last_epoch=lambda epoch, seconds: self._is_last_epoch(group, epoch, seconds),
            on_report=lambda report: self._progress(evaluation.trial.id, course, report),
        )

    def _is_last_epoch(self, group: Group, epoch: int, epoch_seconds: float) -> bool:
        """Whether the job's time is over; collective over the group: the leader decides for all.

        Args:
            group: The trial's.
            epoch: Completed epochs.
            epoch_seconds: What the last one took; the next one has to end in time as well.
        """
        group.check()
        if group.rank == 0:
            ends = self._clock() + epoch_seconds
            is_late = self._deadline is not None and ends > self._deadline
            verdict = EpochVerdict(group.serial, epoch, self._agent.should_stop or is_late)
            for member in group.ranks[1:]:
                self._mailbox.post(verdict, member, Tag.EPOCH)
            return verdict.is_last
        found: list[EpochVerdict] = []

        def arrived() -> bool:
            mail = self._mailbox.take(Tag.EPOCH)
            if mail is not None and mail[1].serial == group.serial:
                found.append(mail[1])
            return bool(found)

        wait_until(arrived, check=group.check)
        if found[0].epoch != epoch:
            raise InternalError(
                f"rank {self._world.rank} is at epoch {epoch}, its leader at {found[0].epoch}: "
                f"the ranks of a trial must leave trial.epochs() together"
            )
        return found[0].is_last

    def _progress(self, trial_id: int, course: _Course, report: Report) -> None:
        if course.reports and course.reports[-1].epoch == report.epoch:
            course.reports.pop()
        course.reports.append(report)
        now = time.monotonic()
        if now - self._last_progress > _REPORT_INTERVAL_SECONDS:
            self._last_progress = now
            self._mailbox.post(Progressed(trial_id, report), 0, Tag.EVENT)

    # The end of an evaluation.

    def _fail(self, group: Group, course: _Course, error: BaseException) -> None:
        """Note a failure of this rank and tell the other members; local."""
        course.failed_at = time.time()
        if isinstance(error, KeyboardInterrupt):
            self._agent.signal("KeyboardInterrupt")
        cause = self._cause(group, error)
        course.is_consequence = cause is not None
        if cause is not None:
            course.failure = cause
            return
        # Copes with an error that cannot even say what it is.
        told = traceback.TracebackException.from_exception(error)
        course.failure = Failure(
            rank=self._world.rank,
            kind=type(error).__name__,
            message=" ".join(str(told).split())[:500],
            traceback="".join(told.format()),
        )
        for member in group.ranks:
            if member != self._world.rank:
                self._mailbox.post(Abort(group.serial, course.failure), member, Tag.ALERT)

    def _cause(self, group: Group, error: BaseException) -> Failure | None:
        """The failure of another member behind this one, if there is one."""
        if group.size == 1 and not group.is_aborted:
            return None
        looks_like_consequence = isinstance(error, (GroupAborted, RuntimeError))
        if looks_like_consequence and self._agent.cause is None:
            # A broken connection may be seen before the word of who broke it.
            wait_until(
                lambda: self._agent.cause is not None,
                check=self._world.serve,
                timeout_seconds=_CAUSE_WAIT_SECONDS,
            )
        return self._agent.cause

    def _report_end(
        self, allocation: Allocation, group: Group, course: _Course, t_start: float
    ) -> None:
        """The leader: gather how it went on every member and tell the coordinator."""
        ends = self._member_ends(group)
        failure = course.failure
        if any(end.failure for end in ends):
            own = MemberEnd(
                group.serial, course.spent, failure, False, course.failed_at, course.is_consequence
            )
            failed = [end for end in (own, *ends) if end.failure is not None]
            failure = min(failed, key=lambda end: (end.is_consequence, end.time)).failure
        spents = [course.spent, *(end.spent for end in ends)]
        ending = Ending.FAILED if failure else Ending.FINISHED
        if not failure and any([course.is_interrupted, *(end.is_interrupted for end in ends)]):
            ending = Ending.INTERRUPTED
        objective = None
        if ending is Ending.FINISHED:
            objective = course.reports[-1].metrics[self._experiment.objective.metric]
        saving = None
        if not failure and course.state is not None:
            saving = course.state.epoch
            self._saver.save(course.state)
        event = Ended(
            serial=allocation.serial,
            ending=ending.value,
            reports=tuple((each.epoch, each.metrics, each.seconds) for each in course.reports),
            objective=objective,
            failure=failure,
            t_start=t_start,
            t_stop=self._clock(),
            spent=(
                max(spent.resplit for spent in spents),
                max(spent.restore for spent in spents),
                max(spent.train for spent in spents),
                max(spent.save for spent in spents),
            ),
            saving=saving,
        )
        self._mailbox.post(event, 0, Tag.EVENT)

    def _member_ends(self, group: Group) -> list[MemberEnd]:
        ends: list[MemberEnd] = []

        def all_here() -> bool:
            while len(ends) < group.size - 1:
                mail = self._mailbox.take(Tag.MEMBER)
                if mail is None:
                    return False
                if mail[1].serial == group.serial:
                    ends.append(mail[1])
            return True

        wait_until(all_here, check=self._world.serve)
        return ends


def _give_memory_back() -> None:
    """After a failure: frames and cycles may hold a model, and the allocator what it had."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # a rank that shares the GPU may need it
