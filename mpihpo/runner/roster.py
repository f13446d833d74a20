"""The roster: which ranks are lost, and which one watches over the dispatcher."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mpihpo.comm.mailbox import Tag
from mpihpo.runner.orders import Alive, Gone

if TYPE_CHECKING:
    from mpihpo.comm.mailbox import Mailbox


class Roster:
    """Told by the dispatcher, and tells the ranks; local.

    Args:
        mailbox: Of the dispatcher's rank.
        training_ranks: World ranks that take orders.
        beat_seconds: How often the deputy is told that the dispatcher is alive; None: never.
    """

    def __init__(
        self, mailbox: Mailbox, training_ranks: Sequence[int], beat_seconds: float | None
    ) -> None:
        self._mailbox, self._training_ranks = mailbox, training_ranks
        self._beat_seconds = beat_seconds
        self._next_beat = 0.0
        self._deputy: int | None = None
        self.lost: set[int] = set()
        """World ranks that are dead or set aside."""

    @property
    def left(self) -> int:
        """How many ranks train that are not lost."""
        return len(set(self._training_ranks).difference(self.lost))

    def lose(self, ranks: Collection[int]) -> None:
        """Ranks are lost."""
        self.lost.update(ranks)
        self._tell()

    def back(self, rank: int) -> None:
        """A rank that was lost is back."""
        self.lost.discard(rank)
        self._tell()

    def beat(self, now: float) -> None:
        """Tell the deputy that the dispatcher is alive, when it is time to."""
        if self._beat_seconds is None or now < self._next_beat:
            return
        self._next_beat = now + self._beat_seconds
        if self._deputy is None or self._deputy in self.lost:
            # It stays the same for as long as it is there: a former one would miss its beats.
            present = (rank for rank in self._training_ranks if rank and rank not in self.lost)
            self._deputy = next(present, None)
        if self._deputy is not None:
            self._mailbox.post(Alive(), self._deputy, Tag.ALERT)

    def _tell(self) -> None:
        """Tell the lost ranks as well: most of them have an agent that reads."""
        alert = Gone(tuple(sorted(self.lost)))
        for rank in self._training_ranks:
            self._mailbox.post(alert, rank, Tag.ALERT)
