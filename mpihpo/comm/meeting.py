"""Ranks wait for each other by messages before they enter an MPI call that cannot be left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpihpo.comm.mailbox import Mailbox, Tag
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import CommError


class Terms(NamedTuple):
    """What those who meet must agree on."""

    generation: int
    """Of the communicator that they will use."""
    ranks: tuple[int, ...]
    """Who meets; the first one finds that all are there."""


class Meetings:
    """The meetings of one rank. To be used by one thread at a time.

    Args:
        mailbox: Carries the messages.
        rank: This rank.
    """

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._here: dict[tuple[str, int], dict[int, Terms | None]] = {}
        self._go: dict[tuple[str, int], Terms] = {}

    def meet(
        self,
        kind: str,
        number: int,
        terms: Callable[[], Terms | None],
        *,
        check: Callable[[], None] | None = None,
        timeout_seconds: float,
    ) -> Terms:
        """Wait until all ranks are here with the same terms; collective over those ranks.

        Args:
            kind: Meetings of a kind are numbered.
            number: Grows from one meeting of a kind to the next, and is the same on all ranks.
            terms: This rank's, asked again and again: they change when a rank dies. None: not yet
                known.
            check: Called while waiting; whatever it raises ends the wait.
            timeout_seconds: How long to wait.

        Raises:
            CommError: Not all came in time.
        """
        key = (kind, number)
        mine: Terms | None = None
        leader = -1

        def all_are_here() -> bool:
            nonlocal mine, leader
            self._read()
            before, mine = mine, terms()
            if mine is None:
                return False
            leader, *others = mine.ranks
            if leader == self._rank:
                here = self._here.get(key, {})
                return all(here.get(other) == mine for other in others)
            if mine != before:
                self._mailbox.post(("here", key, mine), leader, Tag.MEET)
            return self._go.get(key) == mine

        is_met = False
        try:
            is_met = wait_until(all_are_here, check=check, timeout_seconds=timeout_seconds)
            if is_met and leader == self._rank:
                assert mine is not None
                for other in mine.ranks[1:]:
                    self._mailbox.post(("go", key, mine), other, Tag.MEET)
        finally:
            if not is_met and leader not in (-1, self._rank):
                self._mailbox.post(("here", key, None), leader, Tag.MEET)
            here = self._here.get(key, {})
            self._forget(kind, number)
        if not is_met or mine is None:
            raise CommError(_who_is_missing(mine, self._rank, here, timeout_seconds))
        return mine

    def _read(self) -> None:
        while (mail := self._mailbox.take(Tag.MEET)) is not None:
            sender, (word, key, terms) = mail
            if word == "go":
                self._go[key] = terms
            else:
                self._here.setdefault(key, {})[sender] = terms

    def _forget(self, kind: str, number: int) -> None:
        """Drop what was said about this meeting and earlier ones."""
        for words in (self._here, self._go):
            for key in [key for key in words if key[0] == kind and key[1] <= number]:
                del words[key]


def _who_is_missing(
    terms: Terms | None, rank: int, here: dict[int, Any], timeout_seconds: float
) -> str:
    if terms is None:
        return f"the communicator without dead ranks was not there in {timeout_seconds:.0f} s"
    if terms.ranks[0] != rank:
        return f"ranks {terms.ranks} were not all there in {timeout_seconds:.0f} s"
    missing = [other for other in terms.ranks[1:] if here.get(other) != terms]
    return f"of ranks {terms.ranks}, {missing} did not come in {timeout_seconds:.0f} s"
