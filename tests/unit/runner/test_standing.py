"""Where a rank stands: its stacks, and collective calls that last."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest

from mpihpo.runner import standing
from mpihpo.runner.standing import CollectiveWait, merged, stacks
from tests.unit.frames import (
    COMM,
    DDP,
    DISTRIBUTED,
    EXAMPLE,
    MEMBER,
    TORCH,
    TRAIN,
    TRIAL,
    USERS,
    chain,
    function,
)

# Stacks.


def test_stacks_tell_of_all_threads():
    is_over = threading.Event()
    thread = threading.Thread(target=chain((USERS, "waits_in_a_thread"), last=is_over.wait))
    thread.start()
    try:
        text = stacks()
    finally:
        is_over.set()
        thread.join()
    assert 'File "/home/someone/train.py", line 2 in waits_in_a_thread' in text
    assert "in test_stacks_tell_of_all_threads" in text
    assert text == text.strip()


def test_where_nothing_can_be_written_stacks_say_so(monkeypatch: pytest.MonkeyPatch):
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(standing.tempfile, "TemporaryFile", full)
    assert "No space left on device" in stacks()


def told(thread: str, line: int = 9, below: str = "member") -> str:
    return (
        f"Thread {thread} (most recent call first):\n"
        '  File "/lib/mpihpo/runner/agent.py", line 283 in _run\n'
        '  File "/lib/threading.py", line 982 in run\n\n'
        f"Current thread {thread[:-1]}f (most recent call first):\n"
        f'  File "/home/someone/train.py", line {line} in inner\n'
        '  File "/home/someone/train.py", line 20 in train\n'
        f'  File "/lib/mpihpo/runner/{below}.py", line 140 in _train_in_group\n'
        '  File "/lib/mpihpo/runner/member.py", line 99 in take_part\n'
        '  File "/lib/mpihpo/runner/worker.py", line 48 in _take_orders'
    )


def test_merged_shows_equal_stacks_once_and_nothing_of_ours():
    text = merged({2: told("0x00007f01"), 0: told("0x00007fa2"), 1: told("0x00007f03", line=11)})
    assert text == (
        "ranks 0,2:\n"
        "thread (most recent call first):\n"
        '  File "/home/someone/train.py", line 9 in inner\n'
        '  File "/home/someone/train.py", line 20 in train\n'
        "rank 1:\n"
        "thread (most recent call first):\n"
        '  File "/home/someone/train.py", line 11 in inner\n'
        '  File "/home/someone/train.py", line 20 in train'
    )


@pytest.mark.parametrize("name", ["agent.py", "dispatcher.py", "saver.py"])
@pytest.mark.parametrize("frame", ["_run", "run"])
def test_merged_leaves_our_own_threads_out(name: str, frame: str):
    ours = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/lib/mpihpo/comm/mailbox.py", line 60 in take\n'
        f'  File "/lib/mpihpo/runner/{name}", line 10 in {frame}'
    )
    users = 'Thread 0x2 (most recent call first):\n  File "/home/run/agent.py", line 1 in _run'
    users_alone = users.replace("Thread 0x2", "thread")
    assert merged({0: f"{ours}\n\n{users}\n\n{ours}"}) == f"rank 0:\n{users_alone}"


def test_merged_keeps_all_threads_of_the_users():
    loader = 'Thread 0x3 (most recent call first):\n  File "/home/someone/load.py", line 5 in load'
    text = merged({4: f"{loader}\n\n{told('0x00007f01')}"})
    assert "load.py" in text
    assert "train.py" in text
    assert "member.py" not in text
    assert text.count("most recent call first") == 2


# Collective calls that last.


class Training:
    """A thread that trains, in the calls that a test lets it enter and leave."""

    def __init__(self) -> None:
        self.is_inside, self.gate = threading.Event(), threading.Lock()
        self.gate.acquire()
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[CollectiveWait] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.wait = self._made.get(timeout=10)

    def _run(self) -> None:
        self._made.put(CollectiveWait())
        while (call := self._calls.get()) is not None:
            call()
            self._is_over.set()

    def innermost(self, file: str, name: str, after: str = "") -> Callable[..., Any]:
        """A function that waits in C until it is left."""
        body = f"inside.set()\ngate.acquire(timeout=10)\n{after}"
        return function(file, name, body, inside=self.is_inside, gate=self.gate)

    def enter(self, call: Callable[[], Any]) -> None:
        """Start a call, until its innermost function waits."""
        self.is_inside.clear()
        self._is_over.clear()
        self._calls.put(call)
        assert self.is_inside.wait(10)
        end = time.monotonic() + 10
        while self._frame().f_code.co_filename == threading.__file__:
            assert time.monotonic() < end

    def _frame(self) -> FrameType:
        assert self._thread.ident is not None
        return sys._current_frames()[self._thread.ident]

    def leave(self) -> None:
        self.gate.release()
        assert self._is_over.wait(10)

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join(10)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    torch = ModuleType("torch")
    torch.__file__ = f"{TORCH}/__init__.py"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(standing, "_LOOK_SECONDS", 0.0)
    made = Training()
    made.wait.begin()
    yield made
    made.end()


def collective(training: Training, *links: tuple[str, str]) -> Callable[[], Any]:
    """What a training function calls, down to a wait in the runtime's communicator."""
    last = training.innermost(COMM, "_wait")
    return chain((MEMBER, "take_part"), (MEMBER, "_train_in_group"), *links, last=last)


ALLREDUCE = ((USERS, "train"), (COMM, "Allreduce"))


def test_a_lasting_call_is_seen_with_its_name_and_place(training: Training):
    training.enter(collective(training, *ALLREDUCE))
    assert training.wait.lasting(0.0) is None
    training.wait.look()
    assert training.wait.lasting(0.0) == "Allreduce at train.py:2"
    assert training.wait.lasting(60.0) is None
    time.sleep(0.05)
    training.wait.look()
    assert training.wait.lasting(0.05) == "Allreduce at train.py:2"
    training.leave()
    training.wait.look()
    assert training.wait.lasting(0.0) is None


def test_a_loop_of_short_calls_is_no_lasting_call(training: Training):
    began = time.monotonic()
    for _ in range(20):
        training.enter(collective(training, *ALLREDUCE))
        training.wait.look()
        assert training.wait.lasting(0.0) == "Allreduce at train.py:2"
        time.sleep(0.02)
        training.leave()
        training.enter(collective(training, *ALLREDUCE))
        training.wait.look()  # at the same line again, in another call
        assert training.wait.lasting((time.monotonic() - began) / 2 + 0.02) is None
        training.leave()


def test_ranks_that_compute_wait_for_nothing(training: Training):
    training.enter(chain((MEMBER, "_train_in_group"), last=training.innermost(USERS, "train")))
    training.wait.look()
    assert training.wait.lasting(0.0) is None
    training.leave()


def test_before_the_training_and_after_it_nothing_is_held(training: Training):
    training.wait.forget()
    training.enter(collective(training, *ALLREDUCE))
    training.wait.look()
    assert training.wait.lasting(0.0) is None
    training.wait.begin()
    training.wait.look()
    assert training.wait.lasting(0.0) is not None
    training.wait.forget()
    assert training.wait.lasting(0.0) is None
    training.wait.look()
    assert training.wait.lasting(0.0) is None
    training.leave()


@pytest.mark.parametrize(
    ("links", "text"),
    [
        ([TRAIN, (COMM, "recv"), (COMM, "_matched")], "recv at train.py:2"),
        ([TRAIN, (USERS, "mean"), (COMM, "Bcast")], "Bcast at train.py:2"),
        ([TRAIN, (TRIAL, "mean"), (TRIAL, "_sum"), (COMM, "Allreduce")], "mean at train.py:2"),
        ([TRAIN, (DISTRIBUTED, "all_reduce")], "all_reduce at train.py:2"),
        ([TRAIN, (f"{TORCH}/nn/loss.py", "loss"), (DISTRIBUTED, "gather")], "loss at train.py:2"),
        ([(EXAMPLE, "train"), (COMM, "Bcast")], "Bcast at digits.py:2"),
        ([("/src/torch/distributed/mine.py", "train"), (COMM, "Bcast")], "Bcast at mine.py:2"),
        ([(COMM, "Barrier")], "Barrier after the training function"),
    ],
)
def test_a_call_is_told_as_its_user_knows_it(
    training: Training, links: list[tuple[str, str]], text: str
):
    training.enter(collective(training, *links))
    training.wait.look()
    assert training.wait.lasting(0.0) == text
    training.leave()


def test_a_decorated_call_has_the_name_of_what_is_decorated(training: Training):
    def broadcast() -> None: ...

    names = {"broadcast": broadcast, "called": training.innermost(COMM, "_wait")}
    call = function(DISTRIBUTED, "wrapper", "func = broadcast\ncalled()", **names)
    training.enter(chain((MEMBER, "_train_in_group"), (USERS, "train"), last=call))
    training.wait.look()
    assert training.wait.lasting(0.0) == "broadcast at train.py:2"
    training.leave()


def test_the_wrapper_of_a_parallel_model_counts_itself_only(training: Training):
    in_c = training.innermost(DDP, "_pre_forward")
    training.enter(
        chain((MEMBER, "_train_in_group"), (USERS, "train"), (DDP, "forward"), last=in_c)
    )
    training.wait.look()
    assert training.wait.lasting(0.0) == "forward at train.py:2"
    training.leave()


def test_a_model_that_computes_inside_of_it_does_not_wait(training: Training):
    in_c = training.innermost(USERS, "forward")
    training.enter(chain((USERS, "train"), (DDP, "forward"), last=in_c))
    training.wait.look()
    assert training.wait.lasting(0.0) is None
    training.leave()


def test_a_folder_of_the_users_is_not_torch(training: Training):
    file = "/home/someone/torch/distributed/train.py"
    in_c = training.innermost(file, "train")
    training.enter(chain((MEMBER, "_train_in_group"), last=in_c))
    training.wait.look()
    assert training.wait.lasting(0.0) is None
    training.leave()


def test_a_generator_cannot_be_told_from_its_next_turn_and_is_not_held(training: Training):
    generator = training.innermost(COMM, "parts", "yield 1")
    training.enter(chain((USERS, "train"), last=lambda: list(generator())))
    training.wait.look()
    assert training.wait.lasting(0.0) is None
    training.leave()
