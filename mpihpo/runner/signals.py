"""Signals that ask a job to stop, for as long as it lasts."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpihpo.runner.agent import Agent

_SAME_SIGNAL_SECONDS = 1.0


@contextmanager
def stopping_on(names: Sequence[str]) -> Iterator[Callable[[Agent], None]]:
    """While it lasts, the first of these signals asks the job to stop, a later one acts as before.

    Local; does nothing outside of the process's main thread, which alone may have handlers.

    Yields:
        To be called with the rank's agent, once it is there.
    """
    agents: list[Agent] = []
    first: dict[int, float] = {}
    before: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        # A launcher may hand one Ctrl-C on twice; a person asks again after a while.
        is_repeated = time.monotonic() - first.get(number, math.inf) > _SAME_SIGNAL_SECONDS
        if is_repeated or not agents:
            # Asked again, or before there is anything to lose: as if this handler were not here.
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)
            return
        first.setdefault(number, time.monotonic())
        agents[-1].signal(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        names = ()
    for name in names:
        number = getattr(signal, name)
        handler = signal.getsignal(number)
        before[number] = signal.SIG_DFL if handler is None else handler
        signal.signal(number, handle)
    try:
        yield agents.append
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
