"""Holdings: who holds which trial's state, in memory and on the disk, and within which budget.

The states of parked trials are what a job carries along. Each lies in the memory of its keepers
and, where there is a run folder, in a file. When they grow beyond ``limits.state_bytes``, the least
promising go first: second copies before only ones, then by epochs trained and by objective. A trial
whose state is gone can still be promoted: it trains again from an earlier epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from mpihpo.instructions import Drop, Instruction, Notice
from mpihpo.records import Outcome, reached

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@dataclass(slots=True)
class _Held:
    """One trial's state in the memory of its keepers."""

    ranks: tuple[int, ...]
    size: int


class Holdings:
    """Pure. Sizes are in bytes, of one copy of a state.

    Args:
        budget_bytes: What all states may take together, in the memory of all ranks and, counted
            apart, on the disk; None: no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._budget = budget_bytes
        self._held: dict[int, _Held] = {}
        self._saved: dict[int, dict[int, int]] = {}  # trial to epoch to size, on the disk
        self._in_memory = self._on_disk = 0
        self._expected: dict[int, tuple[int, int]] = {}  # of running trials: in memory, on the disk
        self._coming_memory = self._coming_disk = 0
        self._largest = 0

    def __contains__(self, trial_id: int) -> bool:
        """Whether a trial has left anything that is to be dropped at its end."""
        return trial_id in self._held or trial_id in self._saved

    def holders(self, trial_id: int) -> tuple[int, ...]:
        """World ranks that hold the trial's newest state in memory."""
        held = self._held.get(trial_id)
        return () if held is None else held.ranks

    def newest_saved(self, trial_id: int, epoch: int) -> int:
        """The newest epoch up to ``epoch`` from which the disk lets the trial go on; 0 for none."""
        return max((each for each in self._saved.get(trial_id, ()) if each <= epoch), default=0)

    # What comes and goes.

    def replay(self, saved: Mapping[int, Mapping[int, int]]) -> None:
        """Take over what earlier jobs left on the disk: size by epoch by trial."""
        for trial_id, epochs in saved.items():
            for epoch, size in epochs.items():
                self.saved(trial_id, epoch, size)

    def keep(self, outcome: Outcome) -> list[Instruction]:
        """The keepers of a finished evaluation hold its state; who held an older one drops it."""
        allocation, size = outcome.allocation, outcome.state_bytes
        trial_id = allocation.evaluation.trial.id
        stale = set(self.holders(trial_id)).difference(allocation.keepers)
        self._put(trial_id, allocation.keepers, size or 0)
        if size == 0:  # nothing attached: it can go on from here whoever is lost
            self.saved(trial_id, reached(outcome), 0)
        return [Drop(trial_id, tuple(sorted(stale)))] if stale else []

    def saved(self, trial_id: int, epoch: int, size: int) -> None:
        """A state is on the disk."""
        epochs = self._saved.setdefault(trial_id, {})
        self._on_disk += size - epochs.get(epoch, 0)
        epochs[epoch] = size
        self._largest = max(self._largest, size)

    def outdated(self, trial_id: int, before: int) -> None:
        """States of earlier epochs are deleted, now that there is one of epoch ``before``."""
        for epoch in [each for each in self._saved.get(trial_id, ()) if each < before]:
            self._on_disk -= self._saved[trial_id].pop(epoch)

    def unreadable(self, trial_id: int, epoch: int) -> None:
        """A state on the disk turned out to be damaged or gone."""
        self._on_disk -= self._saved.get(trial_id, {}).pop(epoch, 0)

    def forget(self, trial_id: int) -> list[Instruction]:
        """Drop everything that a trial left that has ended."""
        if trial_id not in self:
            return []
        ranks = self.holders(trial_id)
        self._put(trial_id, (), 0)
        for size in self._saved.pop(trial_id, {}).values():
            self._on_disk -= size
        return [Drop(trial_id, ranks, has_ended=True)]

    def taken_over(self, trial_id: int) -> list[Instruction]:
        """A state that an earlier job saved is newer than what ranks hold of the trial."""
        ranks = self.holders(trial_id)
        self._put(trial_id, (), 0)
        self._saved.setdefault(trial_id, {})
        return [Drop(trial_id, ranks)] if ranks else []

    def lose(self, ranks: Collection[int]) -> list[Instruction]:
        """Ranks are lost, and what they hold; should one come back, it finds what to drop."""
        instructions: list[Instruction] = []
        for trial_id, held in list(self._held.items()):
            lost = tuple(rank for rank in held.ranks if rank in ranks)
            if lost:
                left = tuple(rank for rank in held.ranks if rank not in ranks)
                self._put(trial_id, left, held.size)
                self._saved.setdefault(trial_id, {})
                instructions.append(Drop(trial_id, lost))
        return instructions

    def _put(self, trial_id: int, ranks: tuple[int, ...], size: int) -> None:
        old = self._held.pop(trial_id, None)
        if old is not None:
            self._in_memory -= old.size * len(old.ranks)
        if ranks:
            self._held[trial_id] = _Held(ranks, size)
            self._in_memory += size * len(ranks)
            self._largest = max(self._largest, size)

    # The budget.

    def starts(self, trial_id: int, keepers: int) -> None:
        """An evaluation starts that will end with a state in the memory of ``keepers`` ranks.

        Its size is that of the trial's present one, or else of the largest state so far.
        """
        held = self._held.get(trial_id)
        size = held.size if held is not None else self._largest
        self._expected[trial_id] = (size * keepers, size)
        self._coming_memory += size * keepers
        self._coming_disk += size

    def ends(self, trial_id: int) -> None:
        """The evaluation that was said to start has ended, however."""
        memory, disk = self._expected.pop(trial_id, (0, 0))
        self._coming_memory -= memory
        self._coming_disk -= disk

    def make_room(self, promise: Callable[[int], object]) -> list[Instruction]:
        """Drop what is over the budget, with what the running evaluations will leave.

        Args:
            promise: A sort key by trial, the most promising first; None for a trial whose state
                must stay.
        """
        if self._budget is None:
            return []
        over_memory = self._in_memory + self._coming_memory > self._budget
        over_disk = self._on_disk + self._coming_disk > self._budget
        if not over_memory and not over_disk:
            return []
        holding = self._held.keys() | self._saved.keys()
        ranked = {trial_id: promise(trial_id) for trial_id in holding}
        movable = [
            trial_id
            for trial_id, key in ranked.items()
            if key is not None and trial_id not in self._expected
        ]
        movable.sort(key=ranked.__getitem__, reverse=True)  # type: ignore[arg-type]
        return [*self._evict_copies(movable), *self._evict_files(movable)]

    def _evict_copies(self, movable: Iterable[int]) -> list[Instruction]:
        instructions: list[Instruction] = []
        order = list(movable)
        for left in (1, 0):  # second copies, then only ones
            for trial_id in order:
                held = self._held.get(trial_id)
                if self._in_memory + self._coming_memory <= (self._budget or 0):
                    return instructions
                if held is None or len(held.ranks) <= left or not held.size:
                    continue
                dropped = held.ranks[left:]
                self._put(trial_id, held.ranks[:left], held.size)
                self._saved.setdefault(trial_id, {})
                what = "the second copy of its state" if left else "its state in memory"
                instructions += [Drop(trial_id, dropped), self._told(trial_id, what, held.size)]
        return instructions

    def _evict_files(self, movable: Iterable[int]) -> list[Instruction]:
        instructions: list[Instruction] = []
        for trial_id in movable:
            if self._on_disk + self._coming_disk <= (self._budget or 0):
                break
            size = sum(self._saved.get(trial_id, {}).values())
            if not size:
                continue
            self._saved[trial_id] = {}
            self._on_disk -= size
            instructions += [
                Drop(trial_id, (), from_disk=True),
                self._told(trial_id, "its state on the disk", size),
            ]
        return instructions

    def _told(self, trial_id: int, what: str, size: int) -> Notice:
        limit = _readable(self._budget or 0)
        return Notice(
            f"trial {trial_id}: {what} of {_readable(size)} is dropped, as the least promising "
            f"one, to stay within limits.state_bytes: {limit}"
        )


def _readable(size: int) -> str:
    amount, unit = float(size), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.3g} {_UNITS[unit]}"
