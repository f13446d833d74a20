"""What ranks are writing to the disk, which the job's end waits for."""

from __future__ import annotations

from collections.abc import Collection

from mpihpo.runner.orders import Saved


class Writes:
    """Who is writing what. Pure; told by the dispatcher."""

    def __init__(self) -> None:
        self._saving: dict[tuple[int, int], int] = {}  # trial and epoch to the rank that writes
        self._early: dict[tuple[int, int], Saved] = {}
        self._checkpoint_rank: int | None = None

    @property
    def are_pending(self) -> bool:
        """Whether anything is still being written."""
        return self._checkpoint_rank is not None or bool(self._saving)

    def expect(self, trial_id: int, epoch: int, rank: int) -> Saved | None:
        """A rank is writing a state; returns its word if that came before the outcome."""
        key = (trial_id, epoch)
        if key in self._early:
            return self._early.pop(key)
        self._saving[key] = rank
        return None

    def saved(self, event: Saved) -> bool:
        """A state is on the disk, or cannot be; returns whether its evaluation's outcome is known.

        If not, ``expect`` returns the word.
        """
        key = (event.trial_id, event.epoch)
        if self._saving.pop(key, None) is None:
            self._early[key] = event
            return False
        return True

    def expect_checkpoint(self, rank: int) -> None:
        """A rank is writing the best trial's checkpoint."""
        self._checkpoint_rank = rank

    def checkpoint_written(self) -> None:
        """It is written, or cannot be."""
        self._checkpoint_rank = None

    def lose(self, ranks: Collection[int]) -> tuple[list[tuple[int, int]], bool]:
        """Ranks are lost; returns the trials and epochs they were saving, and if the checkpoint."""
        saving = [key for key, rank in self._saving.items() if rank in ranks]
        for key in saving:
            del self._saving[key]
        has_checkpoint = self._checkpoint_rank in ranks
        if has_checkpoint:
            self._checkpoint_rank = None
        return saving, has_checkpoint
