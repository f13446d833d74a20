"""What is open, and what must be held until the process ends."""

from __future__ import annotations

import threading
from typing import Any, ClassVar


class Registry:
    """Counts every communicator and process group: what was opened must be closed at the end."""

    _kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[tuple[str, int]] = set()
        self.total = 0

    def opened(self, kind: str, serial: int) -> None:
        """Note a new one."""
        with self._lock:
            self._open.add((kind, serial))
            self.total += 1

    def closed(self, kind: str, serial: int) -> None:
        """Note that one is gone."""
        with self._lock:
            self._open.discard((kind, serial))

    def keep(self, thing: Any) -> None:
        """Hold something until the process ends because MPI may still use its memory."""
        self._kept.append(thing)

    @property
    def live(self) -> list[str]:
        """What is open, by kind and serial."""
        with self._lock:
            return [f"{kind} {serial}" for kind, serial in sorted(self._open)]
