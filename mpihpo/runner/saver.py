"""Writes kept states to disk beside the training, so that a killed job can be resumed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from mpihpo.runner.saved_state import write_state
from mpihpo.runner.state import KeptState


class Saver:
    """A thread that writes one state after the other. Use it as a context manager.

    Leaving waits until everything is written. Where threads may not call MPI, `on_done` must not be
    called from one: then `save` writes at once.

    Args:
        folder: Where the states go; None: they are not saved.
        on_done: Called for each state with what went wrong, or None, and the bytes on the disk.
        in_thread: False: write in `save` itself.
    """

    def __init__(
        self,
        folder: Path | None,
        on_done: Callable[[KeptState, str | None, int], None],
        *,
        in_thread: bool,
    ) -> None:
        self._folder = folder
        self._on_done = on_done
        self._states: queue.SimpleQueue[KeptState | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mpihpo saver", daemon=True)
        self._in_thread = in_thread

    def wants(self, state: KeptState) -> bool:
        """Whether `save` would write it: there is a folder, and something to keep."""
        return self._folder is not None and bool(state.parts)

    def save(self, state: KeptState) -> None:
        """Write a state soon; local. It must not change, and ``on_done`` tells when it is there."""
        if not self._in_thread:
            self._write(state)
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._states.put(state)

    def _run(self) -> None:
        while (state := self._states.get()) is not None:
            self._write(state)

    def _write(self, state: KeptState) -> None:
        assert self._folder is not None
        problem, size = None, 0
        try:
            size = write_state(self._folder, state).stat().st_size
        except Exception as error:  # told, and the training goes on
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        self._on_done(state, problem, size)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self._states.put(None)
            self._thread.join()
