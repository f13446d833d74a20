"""Calls test functions on one rank: ``python -m tests.rank_program MODULE FUNCTION...``.

A function is ``name`` or ``name:argument``.

An error on any rank ends the whole job, after its traceback was printed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib import import_module

from mpihpo.comm.sockets import loopback_interface


def main(module: str, *calls: str) -> None:
    # Tests of parts build process groups without the job that would choose the interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    call = ""
    try:
        loaded = import_module(module)
        for call in calls:
            name, _, argument = call.partition(":")
            began = time.monotonic()
            getattr(loaded, name)(*([argument] if argument else []))
            sys.stderr.write(f"{call}: {time.monotonic() - began:.2f} s\n")
    except BaseException:
        sys.stderr.write(f"FAILED in {module}:{call}\n{traceback.format_exc()}")
        sys.stdout.flush()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
