"""Waiting without burning a core: test, then sleep a little longer each time.

A blocking MPI call spins, and a spinning rank takes the core from ranks that train. Everything here
waits by non-blocking call, test and growing sleep, and can therefore also be interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_YIELDS = 20  # a message that is already under way arrives within these
_FIRST_SLEEP = 20e-6
_GROWTH = 1.3


class Backoff:
    """A sleep that starts as a mere yield and grows to ``longest`` seconds."""

    def __init__(self, longest: float = 0.002) -> None:
        self._longest = longest
        self._yields = 0
        self._sleep = _FIRST_SLEEP

    def pause(self) -> None:
        """Give the core away for a moment."""
        if self._yields < _YIELDS:
            self._yields += 1
            time.sleep(0)
            return
        time.sleep(self._sleep)
        self._sleep = min(self._sleep * _GROWTH, self._longest)

    def reset(self) -> None:
        """Start again with short waits: something has just happened."""
        self._yields = 0
        self._sleep = _FIRST_SLEEP


def wait_until(
    ready: Callable[[], bool],
    *,
    check: Callable[[], None] | None = None,
    timeout_seconds: float | None = None,
) -> bool:
    """Wait until ``ready()``; local.

    Args:
        ready: Asked again and again; must not block.
        check: Called between the tries; whatever it raises ends the wait.
        timeout_seconds: Give up after this long.

    Returns:
        True, or False when the time was over first.
    """
    backoff = Backoff()
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while not ready():
        if check is not None:
            check()
        if end is not None and time.monotonic() > end:
            return False
        backoff.pause()
    return True
