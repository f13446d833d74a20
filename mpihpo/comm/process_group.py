"""torch's default process group, built and destroyed again and again in one process.

This module imports torch; it is loaded only where a process group is wanted.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mpihpo.comm import sockets
from mpihpo.comm.store import LISTENS, MpiStore, StoreMail
from mpihpo.errors import CommError, TeardownError

_NCCL_ENVIRONMENT = {
    # The runtime aborts a failed group itself; torch's watchdog would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The heartbeat monitor polls the store from C++ for ever, and this store lives in Python.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def choose_backend(wanted: str, *, ranks_per_node: int) -> str | None:
    """The backend for ``wanted`` (``auto``, ``nccl``, ``gloo``, ``none``) on this node; local.

    NCCL needs a GPU of its own for every rank of a node.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        return wanted
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_per_node
    return "nccl" if has_gpus and dist.is_nccl_available() else "gloo"


def choose_device(backend: str | None, local_rank: int) -> torch.device:
    """The device of this rank, made current; local.

    One visible GPU is the rank's own, whatever its number (a launcher may hide the others); of
    several the node-local rank picks one. It is set before any other CUDA call, or every rank of a
    node would open a context on the first GPU.
    """
    if backend is None or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def warm_up(device: torch.device) -> None:
    """Load what the first group would load: torch._dynamo (2-8 s), the CUDA context; local."""
    import torch._dynamo
    import torch.nn.parallel

    if device.type == "cuda":
        torch.zeros(1, device=device)


class DefaultGroup:
    """torch's default process group over one group's ranks, from `build` to `destroy` or `abort`.

    Args:
        mail: The rank's reader of store messages.
        serial: The group's serial; a fresh key prefix comes with it.
        ranks: World ranks of the members.
        rank: This rank's place among them.
        backend: ``nccl`` or ``gloo``.
        timeout_seconds: For building.
        check: Called while waiting for the store; whatever it raises ends the wait.
    """

    def __init__(
        self,
        mail: StoreMail,
        serial: int,
        ranks: Sequence[int],
        rank: int,
        *,
        backend: str,
        timeout_seconds: float,
        check: Callable[[], None],
    ) -> None:
        self._mail = mail
        self._ranks = tuple(ranks)
        self._rank = rank
        self._backend = backend
        self._before = sockets.open_sockets()
        self._store = MpiStore(mail, serial, ranks, rank, timeout_seconds, check)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._built = False

    def build(self) -> None:
        """Build it and make it torch's default; collective over the members.

        Raises:
            CommError: It could not be built, or torch has another default group already.
        """
        if dist.is_initialized():
            raise CommError("torch.distributed already has a default process group in this process")
        if self._backend == "nccl":
            for name, value in _NCCL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        # Each init wraps sys.excepthook and destroy does not unwrap it: after some hundred groups a
        # traceback would end in a RecursionError.
        excepthook = sys.excepthook
        try:
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if self._backend == "nccl" else "gloo",
                store=self._store,
                rank=self._rank,
                world_size=len(self._ranks),
                timeout=timedelta(minutes=30),
            )
        except Exception as error:
            raise CommError(f"process group over ranks {self._ranks}: {error}") from error
        finally:
            sys.excepthook = excepthook
        for port in sockets.listening_ports(self._before):
            self._store.set(f"{LISTENS}{self._rank}/{port}", b"")
        self._built = True

    def destroy(self) -> None:
        """The normal end: destroy it; collective over the members.

        Raises:
            TeardownError: torch could not.
        """
        if not self._built:
            return
        self._built = False
        try:
            # A training function that destroyed the group itself has done this already.
            if dist.is_initialized():
                if self._backend == "gloo":
                    # gloo's destroy waits 10 ms for each connection that is still up, and none for
                    # one that is down: 60 ms and 13 ms for eight ranks.
                    self.release()
                dist.destroy_process_group()
        except Exception as error:
            raise TeardownError(f"process group over ranks {self._ranks}: {error}") from error
        finally:
            self._mail.close()

    def release(self) -> None:
        """Make every collective on it fail, here and at the peers; local, from any thread."""
        ports = self._store.ports_of_members()
        if ports:
            sockets.shut_down(self._before, ports)
        if self._built and self._backend == "nccl":
            for group in list(dist.distributed_c10d._world.pg_names):
                group.abort()

    def abort(self) -> None:
        """The end after a failure: release the peers and forget the group; local, never waits."""
        self.release()
        self._built = False
        try:
            if dist.is_initialized():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    dist.destroy_process_group()
        finally:
            self._mail.close()
            # Failed training functions leave cycles (traceback, frame, reducer) that hold the
            # group.
            gc.collect()
