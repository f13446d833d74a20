"""The journal: one JSON line per decision and outcome, written by one process, never rewritten.

A line is ``{"seq": 3, "time": 1767000000.123, "kind": "outcome", ..., "crc": "89abcdef"}``: ``seq``
counts from 0, ``time`` is Unix time in seconds, and ``crc`` is the CRC-32 of the line's bytes
without the field ``crc`` itself. Every line is handed to the operating system at once, so that a
killed process loses nothing that it appended; ``sync`` is for what must survive the machine.

Kinds: ``experiment`` (first), ``trial``, ``start``, ``outcome``, ``rung``, ``finish``, and any
other that a reader may skip. Non-finite floats are ``{"float": "nan"}`` (see ``encoding``).
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mpihpo.errors import InternalError, ResultsError
from mpihpo.results.encoding import from_json, to_json

_RESERVED = frozenset({"seq", "time", "kind", "crc"})
_CRC_MARK = b',"crc":"'


@dataclass(frozen=True, slots=True)
class JournalContent:
    """What could be read of a journal."""

    entries: tuple[dict[str, Any], ...]
    """Intact entries in their order, each with ``seq``, ``time``, ``kind`` and its own fields."""
    problem: str | None
    """One line that says what is lost; None when nothing is."""
    end: int
    """Bytes up to the end of the last intact line: a torn rest begins here."""


class Journal:
    """Appends to a journal; use as a context manager, from one thread.

    Args:
        path: The file. It must not exist, unless ``after`` is given.
        after: What ``read_journal`` found in this file: go on behind it, cutting off a torn rest.
        clock: Unix time in seconds.

    Raises:
        ResultsError: On entering, when the file exists or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        after: JournalContent | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._after = after
        self._clock = clock
        self._descriptor = -1
        self._end = after.end if after else 0
        self._next = after.entries[-1]["seq"] + 1 if after and after.entries else 0

    def __enter__(self) -> Journal:
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        if self._after is None:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            self._descriptor = os.open(self.path, flags, 0o666)
            os.ftruncate(self._descriptor, self._end)
        except FileExistsError:
            raise ResultsError(
                f"{self.path}: exists already; give another output folder or resume this one"
            ) from None
        except OSError as error:
            raise ResultsError(f"{self.path}: cannot be written: {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def append(self, kind: str, /, **fields: Any) -> int:
        """Write one entry and return its number.

        Raises:
            ResultsError: The file cannot take it; nothing is left of the entry, so that the same
                call can be made again.
        """
        if not _RESERVED.isdisjoint(fields):
            raise InternalError(f"journal entry {kind}: a field has one of the names {_RESERVED}")
        number = self._next
        entry = {"seq": number, "time": round(self._clock(), 3), "kind": kind, **fields}
        body = to_json(entry).encode("ascii")
        line = b'%s%s%08x"}\n' % (body[:-1], _CRC_MARK, zlib.crc32(body))
        self._write(line)
        self._end += len(line)
        self._next = number + 1
        return number

    def sync(self) -> None:
        """Wait until all entries are on the disk.

        Raises:
            ResultsError: The file system refused.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise ResultsError(f"{self.path}: cannot be synced: {error.strerror}") from error

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise ResultsError(f"{self.path}: cannot be written: {error.strerror}") from error
        if os.fstat(self._descriptor).st_nlink == 0:
            raise ResultsError(f"{self.path}: was deleted while the job wrote it")


def read_journal(path: str | os.PathLike[str]) -> JournalContent:
    """Every intact entry of a journal, also of one that is being written or was damaged.

    Raises:
        ResultsError: There is no such file or it cannot be read.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from error
    entries: list[dict[str, Any]] = []
    broken: list[str] = []
    lost = lost_at_end = 0
    end = offset = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        offset += len(line)
        expected = entries[-1]["seq"] + 1 if entries else 0
        entry = _checked(line)
        if entry is None:
            lost_at_end += 1
            state = "damaged" if line.endswith(b"\n") else "torn"
            broken.append(f"line {number} is {state}")
        elif entry["seq"] < expected:
            broken.append(f"line {number} repeats number {entry['seq']}")
        else:
            lost += entry["seq"] - expected
            lost_at_end = 0
            entries.append(entry)
            end = offset
    problem = None
    if broken or lost:
        shown = [*broken[:3], *([f"{len(broken) - 3} more"] if len(broken) > 3 else [])]
        problem = (
            f"{path}: entries lost: {lost + lost_at_end} "
            f"({'; '.join(shown) or 'numbers are skipped'}), kept: {len(entries)}"
        )
    return JournalContent(tuple(entries), problem, end)


def _checked(line: bytes) -> dict[str, Any] | None:
    """The entry of a whole line with the right checksum."""
    body, mark, tail = line.rpartition(_CRC_MARK)
    if not mark or len(tail) != 11 or tail[8:] != b'"}\n':
        return None
    body += b"}"
    try:
        entry = from_json(body) if tail[:8] == b"%08x" % zlib.crc32(body) else None
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("seq"), int) else None
