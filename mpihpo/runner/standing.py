"""Where this rank stands: its stacks, and whether its training waits for the other ranks.

A rank that waits inside one and the same collective call for long is told by the call's frame: it
is held, and cannot be cleared as long as the call lasts. Two calls at the same line of a fast loop
are two frames, so that a rank that gets on is never taken for one that waits.
"""

from __future__ import annotations

import faulthandler
import inspect
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mpihpo.errors import GroupAborted
from mpihpo.results.encoding import name_ranks

NUDGE = signal.SIGURG
"""Sent to a rank's own thread; ignored unless a handler is there, and hardly used by anyone."""

_PACKAGE = Path(__file__).parent.parent
_COMM = f"{_PACKAGE / 'comm'}/"
_RUNNER = f"{_PACKAGE / 'runner'}/"
_CALL_USERS = ("trial.py", "state.py", "standing.py")  # they call code of the user's
_USERS = (f"{_PACKAGE / 'examples'}/",)
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LOOK_SECONDS = 1.0
_THREAD_ID = re.compile(r"\b(Current t|T)hread 0x[0-9a-f]+")
_BELOW = re.compile(r"\n[^\n]*mpihpo/runner/member\.py[^\n]*_train_in_group(\n  [^\n]*)*")
"""What called the training function: the same everywhere."""
_OWN_THREAD = re.compile(r"mpihpo/runner/(agent|dispatcher|saver)\.py\", line \d+ in (_run|run)\b")


def stacks() -> str:
    """The stacks of all threads of this process, as `faulthandler` writes them; local."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace").strip()
    except OSError as error:  # a full disk is no reason to end the job
        return f"its stacks cannot be written: {error}"


def merged(told: Mapping[int, str]) -> str:
    """The stacks of several ranks as one text: what is equal stands once, and of ours nothing."""
    at: dict[str, list[int]] = {}
    for rank, text in sorted(told.items()):
        threads = [part for part in text.split("\n\n") if not _OWN_THREAD.search(part)]
        plain = _THREAD_ID.sub("thread", _BELOW.sub("", "\n".join(threads)))
        at.setdefault(plain, []).append(rank)
    return "\n".join(f"{name_ranks(ranks)}:\n{text}" for text, ranks in at.items())


@contextmanager
def nudges(should_leave: Callable[[], bool]) -> Iterator[bool]:
    """While it lasts, `NUDGE` raises `GroupAborted` in code of the user's; local.

    A signal ends what no released collective does: an endless loop in Python, a sleep, a wait for a
    lock or for a pipe. The runtime's own calls are left alone: they end by themselves, and must not
    lose a message half-way. A handler that is there before still gets what is not for this rank.

    Args:
        should_leave: Whether the training function runs on although its trial has failed.

    Yields:
        Whether there is a handler: only a process's main thread can have one, and one that is not
        Python's is left alone.
    """
    before = signal.getsignal(NUDGE)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield False
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if should_leave():
            if not _is_in_runtime(frame):
                raise GroupAborted("this rank's trial has failed")
        elif callable(before):
            before(number, frame)

    signal.signal(NUDGE, handle)
    try:
        yield True
    finally:
        if signal.getsignal(NUDGE) is handle:  # else a training function has set its own
            signal.signal(NUDGE, before)


def _is_in_runtime(frame: FrameType | None) -> bool:
    """Whether a stack ends in the runtime's own code, or in what that has called."""
    while frame is not None and frame.f_code.co_name != "_train_in_group":
        name = frame.f_code.co_filename
        if name.startswith(_COMM) or (
            name.startswith(_RUNNER) and Path(name).name not in _CALL_USERS
        ):
            return True
        frame = frame.f_back
    return False


class CollectiveWait:
    """Watches the calling thread from another one, for collective calls that do not end.

    Between `begin` and `forget`. Seen are calls of `torch.distributed`, `DistributedDataParallel`
    itself and those of the trial's communicator; not what is in C++ only, in a backward pass say.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_on = False
        self._held: FrameType | None = None
        self._since = self._next_look = 0.0
        self._text = ""

    def begin(self) -> None:
        """The training function begins."""
        self._is_on = True

    def forget(self) -> None:
        """The training function is over."""
        with self._lock:
            self._is_on, self._held = False, None

    def look(self) -> None:
        """To be called again and again, from another thread; cheap."""
        with self._lock:
            if self._is_on:
                self._look(time.monotonic())

    def _look(self, now: float) -> None:
        if self._held is not None:
            try:
                self._held.clear()
            except RuntimeError:
                return  # it still runs
            self._held = None
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        frame = _collective(sys._current_frames().get(self._thread))
        if frame is not None and not frame.f_code.co_flags & _GENERATORS:
            self._held, self._since, self._text = frame, now, _describe(frame)

    def lasting(self, seconds: float) -> str | None:
        """The call that has lasted so long, or None."""
        if self._held is None or time.monotonic() - self._since < seconds:
            return None
        return self._text


def _torch() -> str | None:
    """The folder of torch, if it is imported: a path of the user's may have a torch in it, too."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return None if file is None else f"{Path(file).parent}/"


def _collective(frame: FrameType | None) -> FrameType | None:
    """The outermost frame of the collective call that a stack ends in, if it ends in one."""
    torch = _torch()
    if frame is None:
        return None
    if torch is not None and frame.f_code.co_filename == f"{torch}nn/parallel/distributed.py":
        return frame  # its callers compute as well
    folders = (_COMM,) if torch is None else (_COMM, f"{torch}distributed/")
    found = None
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        found, frame = frame, frame.f_back
    return found


def _is_users(frame: FrameType) -> bool:
    name, torch = frame.f_code.co_filename, _torch()
    ours = name.startswith(f"{_PACKAGE}/") and not name.startswith(_USERS)
    return not ours and (torch is None or not name.startswith(torch))


def _describe(frame: FrameType) -> str:
    """The call as its user knows it: what was called, and from where."""
    call = frame
    while frame.f_back is not None:
        if frame.f_code.co_name in ("_train_in_group", "take_part"):
            return f"{_name(call)} after the training function"
        if _is_users(frame):
            return f"{_name(call)} at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if not frame.f_code.co_name.startswith("_"):
            call = frame
        frame = frame.f_back
    return _name(call)


def _name(frame: FrameType) -> str:
    name = frame.f_code.co_name
    if name == "wrapper":  # torch decorates its collectives
        function = frame.f_locals.get("func")
        return str(getattr(function, "__name__", name))
    return name
