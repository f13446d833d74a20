"""Waiting without burning a core: test, then sleep a little longer each time.

A blocking MPI call spins, and a spinning rank takes the core from ranks that train. Everything here
waits by non-blocking call, test and growing sleep, and can therefore also be interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SHARE = 0.01  # of the time waited so far: what a sleep can add to a wait


class Backoff:
    """Sleeps that grow with the time waited: a hundredth of it, up to ``longest`` seconds.

    So no wait becomes longer by more than one in a hundred, and a long one costs next to nothing.
    """

    def __init__(self, longest: float = 0.002) -> None:
        self._longest = longest
        self._since = time.monotonic()

    def pause(self) -> None:
        """Give the core away for a moment."""
        time.sleep(min(self._longest, _SHARE * (time.monotonic() - self._since)))

    def reset(self) -> None:
        """Start again with short waits: something has just happened."""
        self._since = time.monotonic()


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
