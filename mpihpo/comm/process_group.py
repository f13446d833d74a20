"""torch's default process group, built and destroyed again and again in one process.

This module imports torch; it is loaded only where a process group is wanted.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mpihpo.comm import sockets
from mpihpo.comm.devices import DeviceChoice, Surroundings
from mpihpo.comm.store import LISTENS, MpiStore, StoreMail
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import CommError, TeardownError

_GLOO_THREADS = 2
_DRAIN_SECONDS = 5.0
_LET_GO_SECONDS = 0.0005

_NCCL_ENVIRONMENT = {
    # The runtime aborts a failed group itself; torch's watchdog would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The heartbeat monitor must not end the process either: a long compilation is no fault.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # It would still ask the store every second, from a thread that needs the interpreter's lock
    # while a dying process group waits for the thread with the lock held.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def look_around(*, local_rank: int, ranks_on_node: int) -> Surroundings:
    """What this rank sees; opens no CUDA context. Local."""
    return Surroundings(
        visible_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        ranks_on_node=ranks_on_node,
        local_rank=local_rank,
        has_nccl=dist.is_nccl_available(),
    )


def has_default_group() -> bool:
    """Whether torch has a default process group in this process; local."""
    return bool(dist.is_initialized())


def take_device(choice: DeviceChoice) -> torch.device:
    """The device of this rank, made current; local.

    It is set before any other CUDA call, or every rank of a node would open a context on the first
    GPU.
    """
    if choice.gpu is None:
        return torch.device("cpu")
    device = torch.device("cuda", choice.gpu)
    torch.cuda.set_device(device)
    return device


@contextmanager
def nccl_environment(backend: str | None) -> Iterator[None]:
    """What torch is told by environment variables about NCCL groups, and put back; local.

    Held as long as groups are built: a training function may build some of its own.
    """
    wanted = _NCCL_ENVIRONMENT if backend == "nccl" else {}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
        self._is_default = False

    def build(self) -> None:
        """Build it and make it torch's default; collective over the members.

        Raises:
            CommError: It could not be built, or torch has another default group already.
        """
        if dist.is_initialized():
            raise CommError("torch.distributed already has a default process group in this process")
        # Each init wraps sys.excepthook and destroy does not unwrap it: after some hundred groups a
        # traceback would end in a RecursionError.
        excepthook = sys.excepthook
        # torch numbers its groups by a counter of the process, names the keys by it, and sets it
        # back only when it destroys a default group: after a build that failed, or was never
        # begun on a rank, the members would wait for keys of different names.
        dist.distributed_c10d._world.group_count = 0
        # The group's own time-out, of half an hour, is for collectives.
        self._store.longest_seconds = self._timeout.total_seconds()
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
            self._store.longest_seconds = None
        self._is_default = True
        for port in sockets.listening_ports(self._before):
            self._store.set(f"{LISTENS}{self._rank}/{port}", b"")
        if self._backend == "nccl":
            self._connect()
        self._built = True

    def _connect(self) -> None:
        """Make the NCCL communicator; collective over the members.

        Otherwise the first collective makes it, and a rank that waits there for one that has failed
        could not be released: NCCL cannot abort a communicator that is not there yet.
        """
        group = dist.group.WORLD
        assert group is not None
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            group._get_backend(device).eager_connect_single_device(device)
        except Exception as error:
            raise CommError(f"NCCL over ranks {self._ranks}: {error}") from error

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
                    _drain()
                    # gloo's destroy waits 10 ms for each connection that is still up, and none for
                    # one that is down: 60 ms and 13 ms for eight ranks.
                    self.release()
                _destroy_default()
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
            # Those that a training function has made too; no public name lists them.
            for group in list(dist.distributed_c10d._world.pg_names):
                _abort(group)

    def abort(self) -> None:
        """The end after a failure: release the peers and forget the group; local, never waits."""
        self.release()
        self._built = False
        try:
            if self._is_default and dist.is_initialized():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if self._backend == "gloo":
                        _drain()
                    _destroy_default()
        finally:
            self._mail.close()
            # Failed training functions leave cycles (traceback, frame, reducer) that hold the
            # group.
            gc.collect()


def _drain() -> None:
    """Wait until gloo's threads have done what nobody waited for; local where connections are down.

    A group is freed with the interpreter's lock held and waits for its threads, which need the lock
    to let go of a tensor. So they must be idle by then: a barrier queues behind the rest, one for
    each of gloo's two threads.
    """
    try:
        works = [dist.barrier(async_op=True) for _ in range(_GLOO_THREADS)]
    except Exception:
        return  # the connections are down: nothing can be under way
    wait_until(
        lambda: all(work is None or work.is_completed() for work in works),
        timeout_seconds=_DRAIN_SECONDS,
    )
    time.sleep(_LET_GO_SECONDS)


def _destroy_default() -> None:
    """Destroy torch's default group and those made from it; local but for what the groups ask.

    torch's own list of groups would let go of the last reference; with references of ours, the
    groups are freed here, one after the other.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    groups.clear()


def destroy_foreign_default() -> None:
    """Destroy a default group that a training function made and left; local."""
    if dist.is_initialized():
        _destroy_default()


def _abort(group: dist.ProcessGroup) -> None:
    """Make its NCCL kernels end; local. `ProcessGroup.abort` itself is newer than torch 2.6."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return  # a group for the CPU
    if isinstance(backend, dist.ProcessGroupNCCL):
        backend.abort()
