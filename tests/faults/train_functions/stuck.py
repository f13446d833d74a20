"""Training functions in which a rank never returns, or is killed, as the case says."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
import time

import marks
import numpy as np
from marks import is_first, note

HELD_SECONDS = 6.0
STAY_SECONDS = 1.0


def train(config, trial):
    note(trial, "entered")
    case = trial.arguments["cases"][config["case"]]
    if "kind" not in case:
        stay_while_others_are_out(trial)
    weights = np.zeros(4)
    trial.attach(weights=weights)
    for epoch in trial.epochs():
        assert (weights == epoch - 1).all(), f"state {weights} before epoch {epoch}"
        trial.mean(1.0)
        weights += 1
        if epoch == 2 and "kind" in case:
            if trial.rank == case["position"]:
                if case["kind"] != "killed":
                    note(trial, "fault")
                KINDS[case["kind"]](trial)
            elif case["kind"] == "slow":
                KINDS[case["kind"]](trial)
        trial.comm.Barrier()
        trial.report(epoch, loss=float(config["case"]))


def stay_while_others_are_out(trial):
    """So that there still are trials for the ranks of faulty ones when they come back."""
    end = time.monotonic() + STAY_SECONDS
    while time.monotonic() < end:
        noted = marks.read(marks.path(trial))
        faulty = {mark["trial"] for mark in noted if mark["what"] == "fault"}
        aside = {number: trial.arguments["cases"][number]["aside"] for number in faulty}
        if all(marks.seconds_to_reuse(noted, *each) is not None for each in aside.items()):
            return
        time.sleep(0.05)


def slow(trial):
    """All its ranks take part in every step."""
    for _ in range(1000):
        time.sleep(0.01)
        trial.mean(1.0)


def endless_loop(trial):
    while True:
        pass


def loop_that_swallows(trial):
    """Nothing that an ``except Exception`` may stop."""
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def asleep(trial):
    time.sleep(3600)


def waits_for_a_lock(trial):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_queue(trial):
    """The thread that should have filled it is gone."""
    queue.Queue().get()


def reads_a_pipe(trial):
    reading, _ = os.pipe()
    os.read(reading, 1)


def sleeps_in_libc(trial):
    ctypes.CDLL(None).sleep(3600)


def receives_from_nobody(trial):
    """Its peers wait in another call of the trial's communicator."""
    trial.comm.recv(source=(trial.rank + 1) % trial.world_size, tag=77)


def other_collective(trial):
    trial.comm.Allreduce(np.zeros(3), np.zeros(3))


def never_returns(library):
    """Locks what it holds itself: no signal ends that."""
    mutex = ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def never_returns_from_libc(trial):
    never_returns(ctypes.CDLL(None))


def holds_the_gil_for_ever(trial):
    never_returns(ctypes.PyDLL(None))


def comes_back_late(trial):
    """Deaf to signals for a while."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    unlock = threading.Timer(HELD_SECONDS, library.pthread_mutex_unlock, [mutex])
    unlock.daemon = True
    unlock.start()
    library.pthread_mutex_lock(mutex)


def killed(trial):
    if is_first(trial):
        note(trial, "fault")
        os.kill(os.getpid(), signal.SIGKILL)


KINDS = {
    "slow": slow,
    "endless loop": endless_loop,
    "loop that swallows": loop_that_swallows,
    "asleep": asleep,
    "lock": waits_for_a_lock,
    "queue": waits_for_a_queue,
    "pipe": reads_a_pipe,
    "libc sleep": sleeps_in_libc,
    "recv": receives_from_nobody,
    "other collective": other_collective,
    "never returns": never_returns_from_libc,
    "holds the GIL": holds_the_gil_for_ever,
    "late": comes_back_late,
    "killed": killed,
}


def with_gloo(config, trial):
    """One rank sleeps while the others are in a collective of the process group."""
    import torch
    import torch.distributed as dist

    note(trial, "entered")
    case = trial.arguments["cases"][config["case"]]
    for epoch in trial.epochs():
        if "kind" in case:
            if trial.rank == case["position"]:
                note(trial, "fault")
                if case["kind"] == "asleep":
                    time.sleep(3600)
                elif case["kind"] == "receives":
                    dist.recv(torch.zeros(1), (trial.rank + 1) % trial.world_size)
                else:
                    dist.broadcast(torch.zeros(3), trial.rank)
                    dist.barrier()
            dist.all_reduce(torch.zeros(3))
        trial.report(epoch, loss=1.0)
