"""A program that runs an experiment as a part of what it does: ``embedded.py EXPERIMENT``.

With ``--without-a-rank`` in front it expects that one rank never returns."""

from __future__ import annotations

import signal
import sys
import threading
import time

from mpi4py import MPI

import mpihpo

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG)


class Raising:
    """A searcher that fails after some trials."""

    def __init__(self, *, space, seed, mode, trials) -> None:
        self.space, self.seed, self.trials = space, seed, trials

    def ask(self, trial_id):
        if trial_id == 3:
            raise LookupError("no more ideas")
        return self.space.sample(self.seed, trial_id)

    def tell(self, outcome) -> None:
        pass


def surroundings():
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return handlers, sys.excepthook, sys.stdout, threading.active_count()


def main(*arguments: str) -> None:
    *flags, path = arguments
    before = surroundings()
    try:
        came_to = mpihpo.run(path).reason
    except mpihpo.MpihpoError as error:
        came_to = type(error).__name__
    assert surroundings() == before, f"{surroundings()} instead of {before}"
    comm = MPI.COMM_WORLD
    if not flags:
        assert comm.allreduce(1) == comm.size, "the caller's communicator is of no use any more"
    sys.stdout.write(f"rank {comm.rank} goes on after {came_to}\n")
    sys.stdout.flush()
    if flags and comm.rank == 0:
        time.sleep(1)  # for the others to write
        comm.Abort(0)  # the program's way to end without the rank that is gone


if __name__ == "__main__":
    main(*sys.argv[1:])
