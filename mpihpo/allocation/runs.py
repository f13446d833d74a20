"""A set of integers that finds neighbours quickly."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable


class Runs:
    """A set of integers, kept as its maximal runs of neighbours [start, stop).

    All operations cost O(log n) comparisons for n runs, and short moves inside sorted lists.
    """

    __slots__ = ("_by_length", "_lengths", "_size", "_starts", "_stop_of")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        """Start with ``numbers``."""
        self._size = 0
        self._starts: list[int] = []
        self._stop_of: dict[int, int] = {}
        self._lengths: list[int] = []
        self._by_length: dict[int, list[int]] = {}  # ascending starts
        for number in numbers:
            self.add(number)

    def __len__(self) -> int:
        """How many integers are in the set."""
        return self._size

    def __contains__(self, number: int) -> bool:
        """Whether an integer is in the set."""
        i = bisect_right(self._starts, number) - 1
        return i >= 0 and number < self._stop_of[self._starts[i]]

    def add(self, number: int) -> None:
        """Put in an integer that is not there yet."""
        start, stop = number, number + 1
        i = bisect_right(self._starts, number) - 1
        if i >= 0 and self._stop_of[self._starts[i]] == number:
            start = self._starts[i]
            self._delete(start)
        if stop in self._stop_of:
            after, stop = stop, self._stop_of[stop]
            self._delete(after)
        self._insert(start, stop)

    def remove(self, start: int, stop: int) -> None:
        """Take out the integers of [start, stop), which are all in the set."""
        first = self._starts[bisect_right(self._starts, start) - 1]
        last = self._stop_of[first]
        self._delete(first)
        if first < start:
            self._insert(first, start)
        if stop < last:
            self._insert(stop, last)

    def window(self, count: int, near: int | None = None) -> tuple[int, int]:
        """Up to ``count`` neighbours [start, stop) out of a set that is not empty.

        They are the closest ones before or after ``near``, which is not in the set, when there are
        ``count`` of them (at equal distance those of the shorter run);
        else from the shortest run that has ``count``; else they are the whole longest run.
        """
        if near is not None:
            i = bisect_left(self._starts, near)
            beside = []
            if i > 0:
                start = self._starts[i - 1]
                stop = self._stop_of[start]
                if stop - start >= count:
                    beside.append((near - stop, stop - start, stop - count))
            if i < len(self._starts):
                start = self._starts[i]
                stop = self._stop_of[start]
                if stop - start >= count:
                    beside.append((start - near - 1, stop - start, start))
            if beside:
                _, _, start = min(beside)
                return start, start + count
        i = bisect_left(self._lengths, count)
        if i == len(self._lengths):
            longest = self._lengths[-1]
            start = self._by_length[longest][0]
            return start, start + longest
        start = self._by_length[self._lengths[i]][0]
        return start, start + count

    def _insert(self, start: int, stop: int) -> None:
        length = stop - start
        insort(self._starts, start)
        self._stop_of[start] = stop
        if length not in self._by_length:
            insort(self._lengths, length)
            self._by_length[length] = []
        insort(self._by_length[length], start)
        self._size += length

    def _delete(self, start: int) -> None:
        length = self._stop_of.pop(start) - start
        del self._starts[bisect_left(self._starts, start)]
        starts = self._by_length[length]
        del starts[bisect_left(starts, start)]
        if not starts:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._size -= length
