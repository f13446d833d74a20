"""The signal that interrupts a training function whose trial has failed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mpihpo.errors import GroupAborted
from mpihpo.runner import standing
from mpihpo.runner.standing import NUDGE, nudges
from tests.unit.frames import COMM, MEMBER, PACKAGE, STATE, TRIAL, USERS, chain


@contextmanager
def nudged(after: float = 0.1, every: float = 0.2) -> Iterator[threading.Event]:
    """The signal comes again and again, to this thread; the event tells that it is to be left."""
    is_over, should_leave = threading.Event(), threading.Event()
    main = threading.get_ident()

    def send() -> None:
        if is_over.wait(after):
            return
        should_leave.set()
        signal.pthread_kill(main, NUDGE)
        while not is_over.wait(every):
            signal.pthread_kill(main, NUDGE)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield should_leave
    finally:
        is_over.set()
        thread.join()


def endless_loop() -> None:
    while True:
        pass


def swallowing_loop() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def asleep() -> None:
    time.sleep(60)


def locked() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits() -> None:
    threading.Event().wait()


def reads_a_pipe() -> None:
    reading, writing = os.pipe()
    try:
        os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    "stay", [endless_loop, swallowing_loop, asleep, locked, waits, reads_a_pipe]
)
def test_code_of_the_users_is_left(stay: Callable[[], None]):
    before = signal.getsignal(NUDGE)
    train = chain((MEMBER, "take_part"), (MEMBER, "_train_in_group"), (USERS, "train"), last=stay)
    with nudged() as should_leave, nudges(should_leave.is_set) as has_handler:
        assert has_handler
        with pytest.raises(GroupAborted):
            train()
    assert signal.getsignal(NUDGE) == before


@pytest.mark.parametrize("file", [TRIAL, STATE])
def test_code_that_the_trial_calls_is_left_too(file: str):
    train = chain((MEMBER, "_train_in_group"), (USERS, "train"), (file, "attach"), last=asleep)
    with nudged() as should_leave, nudges(should_leave.is_set), pytest.raises(GroupAborted):
        train()


@pytest.mark.parametrize(
    "links",
    [
        [(COMM, "Allreduce")],
        [(MEMBER, "_is_last_epoch")],
        [(str(PACKAGE / "runner" / "handover.py"), "broadcast_parts")],
        [(str(PACKAGE / "runner" / "handover.py"), "broadcast_parts"), ("/lib/numpy.py", "empty")],
    ],
)
def test_calls_of_the_runtime_are_not_left(links: list[tuple[str, str]]):
    should_leave = threading.Event()

    def waits() -> None:
        should_leave.set()
        for _ in range(20):
            signal.raise_signal(NUDGE)
        should_leave.clear()

    train = chain((MEMBER, "_train_in_group"), (USERS, "train"), *links, last=waits)
    with nudges(should_leave.is_set):
        train()
    assert not should_leave.is_set()


def test_without_a_failure_nobody_is_disturbed():
    with nudged(every=0.02), nudges(lambda: False):
        time.sleep(0.3)


def test_a_handler_of_the_users_gets_what_is_not_for_the_runtime():
    got: list[int] = []

    def handle(number: int, frame: object) -> None:
        got.append(number)

    before = signal.signal(NUDGE, handle)
    try:
        with nudges(lambda: False):
            os.kill(os.getpid(), NUDGE)
            assert got == [NUDGE]
        assert signal.getsignal(NUDGE) is handle
        with nudges(lambda: True), pytest.raises(GroupAborted):
            signal.raise_signal(NUDGE)
        assert got == [NUDGE]
        assert signal.getsignal(NUDGE) is handle
    finally:
        signal.signal(NUDGE, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_was_set_before_is_set_again(handler: signal.Handlers):
    before = signal.signal(NUDGE, handler)
    try:
        with nudges(lambda: False):
            os.kill(os.getpid(), NUDGE)
        assert signal.getsignal(NUDGE) is handler
    finally:
        signal.signal(NUDGE, before)


def test_a_handler_that_the_training_sets_stays():
    def handle(number: int, frame: object) -> None: ...

    before = signal.getsignal(NUDGE)
    try:
        with nudges(lambda: False):
            signal.signal(NUDGE, handle)
        assert signal.getsignal(NUDGE) is handle
    finally:
        signal.signal(NUDGE, before)


def test_a_handler_that_is_not_pythons_stays(monkeypatch: pytest.MonkeyPatch):
    """Python could not put it back."""
    before = signal.getsignal(NUDGE)
    with monkeypatch.context() as patched:
        patched.setattr(standing.signal, "getsignal", lambda number: None)
        with nudges(lambda: True) as has_handler:
            assert not has_handler
            os.kill(os.getpid(), NUDGE)
    assert signal.getsignal(NUDGE) == before


def test_another_thread_than_the_main_one_has_no_handler():
    before, found = signal.getsignal(NUDGE), []

    def run() -> None:
        with nudges(lambda: True) as has_handler:
            found.append(has_handler)
            found.append(signal.getsignal(NUDGE) == before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False, True]
