"""Holdings: who holds which trial's state, in memory and on the disk, and within which budget.

The states of parked trials are what a job carries along. Each lies in the memory of its keepers
and, where there is a run folder, in a file. When they grow beyond ``limits.state_bytes``, the least
promising go first, second copies before only ones. A trial whose state is gone can still be
promoted: it trains again from an earlier epoch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from mpihpo.instructions import Drop, Instruction, Notice
from mpihpo.records import Outcome, reached

Promise = tuple[int, float, int]
"""Sorts trials as ``records.best_outcome`` does: minus the epochs trained, key of the objective,
id."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@dataclass(slots=True)
class _Kept:
    """What there is of one trial's state."""

    promise: Promise
    ranks: tuple[int, ...] = ()
    size: int = 0
    """Of one copy, in bytes; stays when the copies go."""
    files: dict[int, int] = field(default_factory=dict)
    """Epoch to size, of what is on the disk."""
    writing: dict[int, int] = field(default_factory=dict)
    """The same, of what is on its way to the disk if there is one."""


class _Ranking:
    """Trials in the order of their promise; finding the last costs O(1), the rest O(log n)."""

    __slots__ = ("_promises",)

    def __init__(self) -> None:
        self._promises: list[Promise] = []

    def add(self, promise: Promise) -> None:
        insort(self._promises, promise)

    def remove(self, promise: Promise) -> None:
        del self._promises[bisect_left(self._promises, promise)]

    def last(self, but: int | None) -> int | None:
        """The least promising trial other than ``but``."""
        return next((each[-1] for each in reversed(self._promises) if each[-1] != but), None)


class Holdings:
    """Pure. All calls but `lose` cost O(log n) comparisons for n trials that have not ended.

    Args:
        budget_bytes: What all states may take together, in the memory of all ranks and, counted
            apart, on the disk; None: no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._budget = math.inf if budget_bytes is None else budget_bytes
        self._kept: dict[int, _Kept] = {}
        self._running: dict[int, int] = {}  # to how many keepers
        # Bytes that are there and those that running evaluations will leave; of these the ones
        # whose size nobody knows yet are counted apart, and taken for as large as the largest.
        self._in_memory = self._on_disk = 0
        self._unknown_in_memory = self._unknown_on_disk = self._largest = 0
        self._with_copies, self._with_memory, self._with_files = (_Ranking() for _ in range(3))

    def holders(self, trial_id: int) -> tuple[int, ...]:
        """World ranks that hold the trial's newest state in memory."""
        kept = self._kept.get(trial_id)
        return () if kept is None else kept.ranks

    def newest_saved(self, trial_id: int, epoch: int) -> int:
        """The newest epoch up to ``epoch`` from which the disk lets the trial go on; 0 for none."""
        kept = self._kept.get(trial_id)
        return max((each for each in kept.files if each <= epoch), default=0) if kept else 0

    # What comes and goes.

    def replay(self, saved: Mapping[int, Mapping[int, int]]) -> None:
        """Take over what earlier jobs left on the disk: size by epoch by trial."""
        for trial_id, epochs in saved.items():
            for epoch, size in epochs.items():
                self.saved(trial_id, epoch, size)

    def starts(self, trial_id: int, keepers: int) -> None:
        """An evaluation starts that will leave its state to ``keepers`` ranks and to the disk."""
        self._count(trial_id, -1)
        self._running[trial_id] = keepers
        self._count(trial_id, 1)

    def ends(self, trial_id: int) -> None:
        """The evaluation that was said to start has ended, however."""
        self._count(trial_id, -1)
        self._running.pop(trial_id, None)
        self._count(trial_id, 1)

    def keep(self, outcome: Outcome, promise: Promise) -> list[Instruction]:
        """The keepers of a finished evaluation hold its state; who held an older one drops it."""
        allocation, size = outcome.allocation, outcome.state_bytes
        trial_id = allocation.evaluation.trial.id
        with self._changing(trial_id) as kept:
            stale = set(kept.ranks).difference(allocation.keepers)
            kept.ranks, kept.size, kept.promise = allocation.keepers, size or 0, promise
            if size == 0:  # nothing attached: it can go on from here whoever is lost
                kept.files[reached(outcome)] = 0
            else:
                kept.writing[reached(outcome)] = size or 0
        return [Drop(trial_id, tuple(sorted(stale)))] if stale else []

    def taken_over(self, outcome: Outcome, promise: Promise) -> list[Instruction]:
        """A state that an earlier job saved is newer than what ranks hold of the trial."""
        trial_id = outcome.allocation.evaluation.trial.id
        with self._changing(trial_id) as kept:
            kept.promise = promise
            ranks, kept.ranks = kept.ranks, ()
        return [Drop(trial_id, ranks)] if ranks else []

    def saved(self, trial_id: int, epoch: int, size: int | None) -> None:
        """A state is on the disk, and older ones than the newest needed are deleted.

        Args:
            trial_id: A trial that has not ended, or the best one.
            epoch: After which the state was saved.
            size: Of the file; None: it could not be written.
        """
        with self._changing(trial_id) as kept:
            kept.writing.pop(epoch, None)
            if size is not None:
                kept.files[epoch] = size
                kept.size = kept.size or size
            # Word of an older state may come late; of a trial whose lower rungs an earlier job
            # lost there may be states that will be needed only later.
            trained = -kept.promise[0]
            newest = max((each for each in kept.files if each <= trained), default=0)
            kept.files = {each: kept.files[each] for each in kept.files if each >= newest}

    def unreadable(self, trial_id: int, epoch: int) -> None:
        """A state on the disk turned out to be damaged or gone."""
        with self._changing(trial_id) as kept:
            kept.files.pop(epoch, None)

    def forget(self, trial_id: int) -> list[Instruction]:
        """Drop everything that a trial left that has ended."""
        if trial_id not in self._kept:
            return []
        self._count(trial_id, -1)
        return [Drop(trial_id, self._kept.pop(trial_id).ranks, has_ended=True)]

    def lose(self, ranks: Collection[int]) -> list[Instruction]:
        """Ranks are lost, and what they hold; should one come back, it finds what to drop."""
        instructions: list[Instruction] = []
        for trial_id, held in self._kept.items():
            lost = tuple(rank for rank in held.ranks if rank in ranks)
            if lost:
                with self._changing(trial_id) as kept:
                    kept.ranks = tuple(rank for rank in kept.ranks if rank not in lost)
                instructions.append(Drop(trial_id, lost))
        return instructions

    # The budget.

    def make_room(self, best: int | None) -> list[Instruction]:
        """Drop what is over the budget, with what the running evaluations will leave.

        States that running evaluations may need stay, and that of the trial ``best``: the result.
        """
        instructions: list[Instruction] = []
        for ranking, left in ((self._with_copies, 1), (self._with_memory, 0)):
            while self._is_memory_over and (trial_id := ranking.last(but=best)) is not None:
                with self._changing(trial_id) as kept:
                    dropped, kept.ranks = kept.ranks[left:], kept.ranks[:left]
                what = "the second copy of its state" if left else "its state in memory"
                instructions += [Drop(trial_id, dropped), self._told(trial_id, what, kept.size)]
        while self._is_disk_over and (trial_id := self._with_files.last(but=best)) is not None:
            with self._changing(trial_id) as kept:
                size = sum(kept.files.values())
                kept.files = {}
            what = "its state on the disk"
            instructions += [
                Drop(trial_id, (), from_disk=True),
                self._told(trial_id, what, size),
            ]
        return instructions

    @property
    def _is_memory_over(self) -> bool:
        return self._in_memory + self._unknown_in_memory * self._largest > self._budget

    @property
    def _is_disk_over(self) -> bool:
        return self._on_disk + self._unknown_on_disk * self._largest > self._budget

    @contextmanager
    def _changing(self, trial_id: int) -> Iterator[_Kept]:
        """What is kept of a trial, to be changed."""
        self._count(trial_id, -1)
        kept = self._kept.get(trial_id)
        if kept is None:
            kept = self._kept[trial_id] = _Kept((0, math.inf, trial_id))
        yield kept
        self._largest = max(self._largest, kept.size, *kept.files.values())
        self._count(trial_id, 1)

    def _count(self, trial_id: int, sign: int) -> None:
        """Put a trial into the sums and the rankings, or take it out of them (``sign`` -1)."""
        if self._budget == math.inf:
            return
        kept, keepers = self._kept.get(trial_id), self._running.get(trial_id)
        if keepers is not None:
            size = 0 if kept is None else kept.size
            self._in_memory += sign * size * keepers
            self._on_disk += sign * size
            self._unknown_in_memory += 0 if size else sign * keepers
            self._unknown_on_disk += 0 if size else sign
        if kept is None:
            return
        filed = sum(kept.files.values())
        self._in_memory += sign * kept.size * len(kept.ranks)
        self._on_disk += sign * (filed + sum(kept.writing.values()))
        if keepers is not None:
            return
        for ranking, has_any in (
            (self._with_copies, kept.size and len(kept.ranks) > 1),
            (self._with_memory, kept.size and kept.ranks),
            (self._with_files, filed and not kept.writing),
        ):
            if has_any:
                (ranking.add if sign > 0 else ranking.remove)(kept.promise)

    def _told(self, trial_id: int, what: str, size: int) -> Notice:
        return Notice(
            f"trial {trial_id}: {what} of {_readable(size)} is dropped, as the least promising "
            f"one, to stay within limits.state_bytes: {_readable(self._budget)}"
        )


def _readable(size: float) -> str:
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"
