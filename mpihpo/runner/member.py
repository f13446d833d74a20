"""One rank's part in one evaluation: build the group, train, say how it went, free the group."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpihpo.comm.group import Group
from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import GroupAborted, InternalError, LossElsewhere, TrialError
from mpihpo.experiment import Experiment
from mpihpo.records import Allocation, Ending, Failure, Report, Spent
from mpihpo.results.encoding import name_ranks
from mpihpo.runner.agent import Agent
from mpihpo.runner.batch import plan_batch
from mpihpo.runner.handover import channel_of, receive_state
from mpihpo.runner.orders import (
    Abort,
    Died,
    Ended,
    EpochVerdict,
    Failing,
    MemberEnd,
    Progressed,
    SendState,
)
from mpihpo.runner.recorder import CHECKPOINTS
from mpihpo.runner.saved_state import read_state, state_path
from mpihpo.runner.saver import Saver
from mpihpo.runner.state import Keeper, KeptState
from mpihpo.runner.torch_set_up import torch_defaults_restored
from mpihpo.runner.trial import Trial

if TYPE_CHECKING:
    from mpihpo.comm.world import World

_CAUSE_WAIT_SECONDS = 0.5  # for the word of the member that failed first
_REPORT_INTERVAL_SECONDS = 0.5  # a report less is no loss: the outcome carries them all


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """What a rank has for all its evaluations."""

    world: World
    experiment: Experiment
    train: Callable[[Any, Trial], object]
    backend: str | None
    """Of the trials' process groups; None for none."""
    device: Any
    local_rank: int
    """This rank's place on its node, among those that train."""
    directory: Path | None
    """The run's folder; None where nothing is written."""
    keeper: Keeper
    agent: Agent
    saver: Saver
    clock: Callable[[], float]
    """Seconds since the job's start."""
    deadline: float | None = None
    """On that clock: leave training functions at the last epoch that ends before."""
    cache: dict[str, Any] = field(default_factory=dict)
    """What training functions keep across trials."""


class Member:
    """This rank as a member of one allocation.

    Args:
        equipment: What the rank has.
        allocation: The evaluation and its ranks, this one among them.
    """

    def __init__(self, equipment: Equipment, allocation: Allocation) -> None:
        self._equipment, self._allocation = equipment, allocation
        self._world, self._mailbox = equipment.world, equipment.world.mailbox
        self._agent, self._directory = equipment.agent, equipment.directory
        self._t_start = equipment.clock()
        self._group = Group(equipment.world, allocation.serial, allocation.ranks, equipment.backend)
        self._spent = Spent()
        self._reports: list[Report] = []
        self._last_progress = time.monotonic()
        self._failure: Failure | None = None
        self._failed_at = 0.0
        self._is_consequence = False  # of another member's failure
        self._is_interrupted = False
        self._has_entered = False  # trial.epochs()
        self._state: KeptState | None = None  # for the disk, once every member has come through
        self._state_bytes: int | None = None

    def take_part(self) -> None:
        """Build, train, keep and free, and tell how it went; collective over the allocation."""
        group = self._group
        self._agent.watch(group)
        try:
            self._train_in_group()
        except BaseException as error:
            self._fail(error)
            # The frames hold the model, and with it the process group, whose sockets must close.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = error.__cause__ = None
        began = time.perf_counter()
        if self._failure is None:
            try:
                group.free()
            except (Exception, GroupAborted) as error:
                self._fail(error)
        if self._failure is not None:
            group.abort()
            _give_memory_back()
        if group.backend is not None:
            from mpihpo.comm.process_group import destroy_foreign_default

            destroy_foreign_default()  # or the next trial on this rank could not have its own
        freed = time.perf_counter() - began
        self._spent = replace(self._spent, resplit=self._spent.resplit + freed)
        self._agent.leave(has_failed=self._failure is not None)
        if group.rank == 0:
            self._report_end()
        else:
            self._mailbox.post(self._end(), self._allocation.leader, Tag.MEMBER)
        self._agent.watch(None)

    def _train_in_group(self) -> None:
        """Build, restore, train and keep; raises whatever goes wrong."""
        allocation, group = self._allocation, self._group
        began = time.perf_counter()
        group.build()
        built = time.perf_counter()
        self._spent = Spent(resplit=built - began)
        trial = self._trial(self._kept_state())
        fetched = time.perf_counter()
        try:
            with torch_defaults_restored(), self._agent.training():
                self._equipment.train(dict(allocation.evaluation.trial.config), trial)
            trial._finish()
            group.check()
        finally:
            trained = time.perf_counter()
            restore = fetched - built + trial._restore_seconds
            self._spent = Spent(
                resplit=built - began, restore=restore, train=trained - built - restore
            )
        self._is_interrupted = trial._is_interrupted
        self._has_entered = trial._uses_epochs
        if group.rank == 0 and not self._has_entered:
            self._tell_epoch(None, is_last=True)  # the others may wait for it
        if self._world.rank in allocation.keepers and trial._completed > trial.start:
            state = trial._take_state()
            self._state_bytes = state.nbytes
            if not trial._is_interrupted:
                self._equipment.keeper.put(state)
            if group.rank == 0 and self._equipment.saver.wants(state):
                self._state = state
            self._spent = replace(self._spent, save=time.perf_counter() - trained)

    def _kept_state(self) -> KeptState | None:
        """The state to start from: kept here, or fetched by the leader if no member keeps it."""
        allocation, group = self._allocation, self._group
        evaluation = allocation.evaluation
        if evaluation.start == 0:
            return None
        trial_id, epoch = evaluation.trial.id, evaluation.start
        kept = self._equipment.keeper.get(trial_id, epoch)
        if not allocation.holders:  # of an earlier job: on the disk
            assert self._directory is not None
            folder = self._directory / CHECKPOINTS
            # A trial that attaches nothing has no file; one that does fails when it attaches.
            if group.rank == 0 and state_path(folder, trial_id, epoch).exists():
                kept = read_state(folder, trial_id, epoch)
        elif group.rank == 0 and not set(allocation.holders) & set(allocation.ranks):
            holder = allocation.holders[0]
            channel = channel_of(group.serial, self._world.tag_limit)
            self._mailbox.post(SendState(trial_id, epoch, channel), holder, Tag.ALERT)

            def check() -> None:
                group.check()
                if holder in self._agent.gone:
                    if holder in self._world.dead:
                        self._mailbox.post(Died(holder), 0, Tag.EVENT)
                    raise LossElsewhere(f"rank {holder}, which held the trial's state, is lost")

            kept = receive_state(self._mailbox, holder, channel, check)
        if kept is not None and (kept.trial_id, kept.epoch) != (trial_id, epoch):
            raise InternalError(
                f"trial {trial_id} after epoch {epoch} was to be restored, and trial "
                f"{kept.trial_id} after epoch {kept.epoch} came"
            )
        return kept

    def _trial(self, kept: KeptState | None) -> Trial:
        equipment, experiment = self._equipment, self._equipment.experiment
        directory = self._directory
        if directory is not None:
            directory = directory / "trials" / str(self._allocation.evaluation.trial.id)
        return Trial(
            allocation=self._allocation,
            group=self._group,
            objective=experiment.objective,
            batch=plan_batch(
                experiment.batch,
                first_width=experiment.allocation.ranks,
                world_size=self._group.size,
            ),
            device=equipment.device,
            local_rank=equipment.local_rank,
            directory=directory,
            arguments=experiment.arguments,
            cache=equipment.cache,
            kept=kept,
            is_last_epoch=self._is_last_epoch,
            on_report=self._progress,
        )

    def _is_last_epoch(self, epoch: int, epoch_seconds: float) -> bool:
        """Whether the job's time is over; collective over the group: the leader decides for all.

        Args:
            epoch: Completed epochs.
            epoch_seconds: What the last one took; the next one has to end in time as well.
        """
        group, deadline = self._group, self._equipment.deadline
        group.check()
        if group.rank == 0:
            ends = self._equipment.clock() + epoch_seconds
            is_late = deadline is not None and ends > deadline
            is_last = self._agent.should_stop or is_late
            self._tell_epoch(epoch, is_last=is_last)
            return is_last
        found: list[EpochVerdict] = []

        def arrived() -> bool:
            mail = self._mailbox.take(Tag.EPOCH)
            if mail is not None and mail[1].serial == group.serial:
                found.append(mail[1])
            return bool(found)

        wait_until(arrived, check=group.check)
        told = found[0].epoch
        if told != epoch:
            leader = "entered no loop" if told is None else f"after epoch {told}"
            raise TrialError(
                f"rank {group.rank} of the trial goes on after epoch {epoch}, its leader {leader}; "
                "expected all ranks to leave trial.epochs() together"
            )
        return found[0].is_last

    def _tell_epoch(self, epoch: int | None, *, is_last: bool) -> None:
        verdict = EpochVerdict(self._group.serial, epoch, is_last)
        for member in self._group.ranks[1:]:
            self._mailbox.post(verdict, member, Tag.EPOCH)

    def _progress(self, report: Report) -> None:
        if self._reports and self._reports[-1].epoch == report.epoch:
            self._reports.pop()
        self._reports.append(report)
        now = time.monotonic()
        if now - self._last_progress > _REPORT_INTERVAL_SECONDS:
            self._last_progress = now
            trial_id = self._allocation.evaluation.trial.id
            self._mailbox.post(Progressed(trial_id, report), 0, Tag.EVENT)

    # The end.

    def _fail(self, error: BaseException) -> None:
        """Note a failure of this rank and tell the other members; local."""
        self._failed_at = time.time()
        if isinstance(error, KeyboardInterrupt):
            self._agent.signal("SIGINT")
        cause = self._cause(error)
        self._is_consequence = cause is not None
        if cause is not None:
            self._failure = cause
            return
        # Copes with an error that cannot even say what it is.
        told = traceback.TracebackException.from_exception(error)
        self._failure = Failure(
            rank=self._world.rank,
            kind=type(error).__name__,
            message=" ".join(str(told).split())[:500],
            traceback="".join(told.format()),
        )
        serial = self._group.serial
        for member in self._group.ranks:
            if member != self._world.rank:
                self._mailbox.post(Abort(serial, self._failure), member, Tag.ALERT)
        if self._group.size > 1:
            self._mailbox.post(Failing(serial, self._failure), 0, Tag.EVENT)

    def _cause(self, error: BaseException) -> Failure | None:
        """The failure of another member behind this one, if there is one."""
        if self._group.size == 1 and not self._group.is_aborted:
            return None
        # A trial's own error follows from no other rank's; torch raises plain RuntimeErrors.
        is_own = isinstance(error, TrialError) or not isinstance(error, RuntimeError)
        if (isinstance(error, GroupAborted) or not is_own) and self._agent.cause is None:
            # A broken connection may be seen before the word of who broke it.
            wait_until(
                lambda: self._agent.cause is not None,
                check=self._world.serve,
                timeout_seconds=_CAUSE_WAIT_SECONDS,
            )
        return self._agent.cause

    def _end(self) -> MemberEnd:
        return MemberEnd(
            rank=self._world.rank,
            serial=self._group.serial,
            spent=self._spent,
            failure=self._failure,
            is_interrupted=self._is_interrupted,
            time=self._failed_at,
            is_consequence=self._is_consequence,
            has_entered=self._has_entered,
        )

    def _report_end(self) -> None:
        """The leader: gather how it went on every member and tell the coordinator."""
        others = self._member_ends()
        if others is None:
            return  # some are lost, and the coordinator knows
        ends = [self._end(), *others]
        failed = [end for end in ends if end.failure is not None]
        first = min(failed, key=lambda end: (end.is_consequence, end.time), default=None)
        failure = self._divergence(ends) if first is None else first.failure
        ending = Ending.FAILED if failure else Ending.FINISHED
        if not failure and any(end.is_interrupted for end in ends):
            ending = Ending.INTERRUPTED
        objective = None
        if ending is Ending.FINISHED:
            objective = self._reports[-1].metrics[self._equipment.experiment.objective.metric]
        saving = None
        if not failure and self._state is not None:
            saving = self._state.epoch
            self._equipment.saver.save(self._state)
        event = Ended(
            serial=self._allocation.serial,
            ending=ending.value,
            reports=tuple((each.epoch, each.metrics, each.seconds) for each in self._reports),
            objective=objective,
            failure=failure,
            t_start=self._t_start,
            t_stop=self._equipment.clock(),
            spent=(
                max(end.spent.resplit for end in ends),
                max(end.spent.restore for end in ends),
                max(end.spent.train for end in ends),
                max(end.spent.save for end in ends),
            ),
            saving=saving,
            state_bytes=self._state_bytes,
        )
        self._mailbox.post(event, 0, Tag.EVENT)

    def _divergence(self, ends: list[MemberEnd]) -> Failure | None:
        """What is wrong though no member has failed: one of them has trained nothing, say."""
        ranks = [end.rank for end in ends if not end.has_entered]
        if not ranks or len(ranks) == len(ends):
            return None
        places = sorted(self._group.ranks.index(rank) for rank in ranks)
        return Failure(
            rank=ranks[0],
            kind=TrialError.__name__,
            message=f"{name_ranks(places)} of the trial did not enter trial.epochs(), the others "
            "did; expected all ranks to leave it together",
        )

    def _member_ends(self) -> list[MemberEnd] | None:
        """How it went on the other members; None where not all of them will come."""
        group = self._group
        ends: list[MemberEnd] = []

        def all_here() -> bool:
            while len(ends) < group.size - 1:
                mail = self._mailbox.take(Tag.MEMBER)
                if mail is None:
                    return False
                if mail[1].serial == group.serial:
                    ends.append(mail[1])
            return True

        wait_until(
            lambda: all_here() or self._agent.is_given_up(group.serial), check=self._world.serve
        )
        return ends if len(ends) == group.size - 1 else None


def _give_memory_back() -> None:
    """After a failure: frames and cycles may hold a model, and the allocator what it had."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # a rank that shares the GPU may need it
