"""The interruptible communicator against mpi4py's own, and out of every wait."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpihpo.comm.interruptible import InterruptibleComm

Comm = MPI.Intracomm


class Left(BaseException):
    """Raised by the check."""


def row(comm: Comm, length: int = 3) -> Any:
    return np.arange(length, dtype=np.float64) * (comm.rank + 2) + 1


def counts(comm: Comm) -> list[int]:
    return [rank + 1 for rank in range(comm.size)]


def filled(comm: Comm, call: Callable[[Any], object], length: int = 3) -> Any:
    """What ``call`` writes into an array."""
    out = np.full(length, -1.0)
    call(out)
    return out.tolist()


def gathered(comm: Comm, root: int) -> Any:
    out = np.full(3 * comm.size, -1.0) if comm.rank == root else None
    comm.Gather(row(comm), out, root)
    return None if out is None else out.tolist()


def gathered_unevenly(comm: Comm, root: int) -> Any:
    out = np.full(sum(counts(comm)), -1.0) if comm.rank == root else None
    comm.Gatherv(row(comm, comm.rank + 1), None if out is None else [out, counts(comm)], root)
    return None if out is None else out.tolist()


def scattered_unevenly(comm: Comm, root: int) -> Any:
    send = [row(comm, sum(counts(comm))), counts(comm)] if comm.rank == root else None
    return filled(comm, lambda out: comm.Scatterv(send, out, root), comm.rank + 1)


def reduced(comm: Comm, root: int, op: MPI.Op) -> Any:
    out = np.full(3, -1.0) if comm.rank == root else None
    comm.Reduce(row(comm), out, op, root)
    return None if out is None else out.tolist()


def in_a_ring(comm: Comm) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def sent_around(comm: Comm, send: Callable[..., Any], receive: Callable[..., Any]) -> Any:
    """Even ranks send first; what each received, with its status."""
    to, source = in_a_ring(comm)
    status = MPI.Status()
    if comm.rank % 2 == 0:
        send(to)
    value = receive(source, status)
    if comm.rank % 2:
        send(to)
    return value, status.Get_source(), status.Get_tag()


def received(comm: Comm) -> Callable[[int, MPI.Status], Any]:
    return lambda source, status: filled(comm, lambda out: comm.Recv(out, source, 5, status))


def replaced(comm: Comm) -> Any:
    to, source = in_a_ring(comm)
    return filled(comm, lambda out: comm.Sendrecv_replace(out, to, 5, source, 5))


def probed(comm: Comm, probe: str) -> Any:
    to, source = in_a_ring(comm)
    status = MPI.Status()
    request = comm.isend(("probed", comm.rank), to, 6)
    found = getattr(comm, probe)(source, 6, status)
    seen = (status.Get_source(), status.Get_tag())
    value = found.recv() if "mprobe" in probe.lower() else comm.recv(None, source, 6)
    request.wait()
    return seen, value


def probed_buffer(comm: Comm) -> Any:
    to, source = in_a_ring(comm)
    request = comm.Isend(row(comm), to, 6)
    message = comm.Mprobe(source, 6)
    value = filled(comm, message.Recv)
    request.Wait()
    return value


OPS = {
    "sum": MPI.SUM,
    "max": MPI.MAX,
    "min": MPI.MIN,
    "prod": MPI.PROD,
}
ROOTS = (0, 1, -1)


def comparisons(size: int) -> dict[str, Callable[[Comm], Any]]:
    """Calls by name; their results must be those of mpi4py."""
    calls: dict[str, Callable[[Comm], Any]] = {
        "Barrier": lambda comm: comm.Barrier(),
        "barrier": lambda comm: comm.barrier(),
        "Allgather": lambda comm: filled(
            comm, lambda out: comm.Allgather(row(comm), out), 3 * size
        ),
        "Allgatherv": lambda comm: filled(
            comm,
            lambda out: comm.Allgatherv(row(comm, comm.rank + 1), [out, counts(comm)]),
            sum(counts(comm)),
        ),
        "Alltoall": lambda comm: filled(
            comm, lambda out: comm.Alltoall(row(comm, size), out), size
        ),
        "Alltoallv": lambda comm: filled(
            comm,
            lambda out: comm.Alltoallv(
                [row(comm, sum(counts(comm))), counts(comm)],
                [out, [comm.rank + 1] * size],
            ),
            (comm.rank + 1) * size,
        ),
        "Alltoallw": lambda comm: filled(
            comm,
            lambda out: comm.Alltoallw(
                [row(comm, size), ([1] * size, [8 * k for k in range(size)]), [MPI.DOUBLE] * size],
                [out, ([1] * size, [8 * k for k in range(size)]), [MPI.DOUBLE] * size],
            ),
            size,
        ),
        "Allreduce in place": lambda comm: in_place(comm),
        "Reduce_scatter_block": lambda comm: filled(
            comm, lambda out: comm.Reduce_scatter_block(row(comm, 3 * size), out)
        ),
        "Reduce_scatter": lambda comm: filled(
            comm,
            lambda out: comm.Reduce_scatter(row(comm, sum(counts(comm))), out, counts(comm)),
            comm.rank + 1,
        ),
        "Reduce_scatter without counts": lambda comm: filled(
            comm,
            lambda out: comm.Reduce_scatter(row(comm, sum(counts(comm))), out),
            comm.rank + 1,
        ),
        "allgather": lambda comm: comm.allgather({"from": comm.rank, "long": "x" * comm.rank}),
        "allgather None": lambda comm: comm.allgather(None),
        "alltoall": lambda comm: comm.alltoall([(comm.rank, to) for to in range(comm.size)]),
        "Send": lambda comm: sent_around(
            comm, lambda to: comm.Send(row(comm), to, 5), received(comm)
        ),
        "Ssend": lambda comm: sent_around(
            comm, lambda to: comm.Ssend(row(comm), to, tag=5), received(comm)
        ),
        "send": lambda comm: sent_around(
            comm,
            lambda to: comm.send({"from": comm.rank}, to, 5),
            lambda source, status: comm.recv(source=source, tag=5, status=status),
        ),
        "ssend": lambda comm: sent_around(
            comm,
            lambda to: comm.ssend({"from": comm.rank}, dest=to, tag=5),
            lambda source, status: comm.recv(None, source, 5, status),
        ),
        "recv from any": lambda comm: sent_around(
            comm,
            lambda to: comm.send({"from": comm.rank}, to, 5),
            lambda source, status: comm.recv(status=status),
        ),
        "sendrecv": lambda comm: comm.sendrecv(
            ("from", comm.rank), in_a_ring(comm)[0], 5, source=in_a_ring(comm)[1], recvtag=5
        ),
        "Sendrecv": lambda comm: filled(
            comm,
            lambda out: comm.Sendrecv(row(comm), in_a_ring(comm)[0], 5, out, in_a_ring(comm)[1], 5),
        ),
        "Sendrecv_replace": replaced,
        "PROC_NULL": lambda comm: (
            comm.send(1, MPI.PROC_NULL),
            comm.Send(row(comm), MPI.PROC_NULL),
        ),
        "recv of PROC_NULL": lambda comm: comm.recv(source=MPI.PROC_NULL),
        "Probe": lambda comm: probed(comm, "Probe"),
        "probe": lambda comm: probed(comm, "probe"),
        "mprobe": lambda comm: probed(comm, "mprobe"),
        "Mprobe": probed_buffer,
    }
    for root in (root % size for root in ROOTS):
        calls |= rooted(root)
    for name, op in OPS.items():
        calls |= reductions(name, op)
        for root in (root % size for root in ROOTS):
            calls[f"Reduce {name} {root}"] = lambda comm, root=root, op=op: reduced(comm, root, op)
            calls[f"reduce {name} {root}"] = lambda comm, root=root, op=op: comm.reduce(
                comm.rank + 2, op, root
            )
    located = {"maxloc": MPI.MAXLOC, "minloc": MPI.MINLOC}
    for name, op in located.items():
        calls[name] = lambda comm, op=op: comm.allreduce((comm.rank % 2, comm.rank), op)
    # Not commutative: the order of the ranks counts.
    calls["texts"] = lambda comm: comm.allreduce(f"<{comm.rank}>")
    calls["texts to the last"] = lambda comm: comm.reduce(f"<{comm.rank}>", root=size - 1)
    calls["texts scanned"] = lambda comm: (
        comm.scan(f"<{comm.rank}>"),
        comm.exscan(f"<{comm.rank}>"),
    )
    return calls


def rooted(root: int) -> dict[str, Callable[[Comm], Any]]:
    return {
        f"Bcast {root}": lambda comm: filled(
            comm, lambda out: comm.Bcast(row(comm) if comm.rank == root else out, root)
        ),
        f"Gather {root}": lambda comm: gathered(comm, root),
        f"Gatherv {root}": lambda comm: gathered_unevenly(comm, root),
        f"Scatter {root}": lambda comm: filled(
            comm,
            lambda out: comm.Scatter(
                row(comm, 3 * comm.size) if comm.rank == root else None, out, root
            ),
        ),
        f"Scatterv {root}": lambda comm: scattered_unevenly(comm, root),
        f"bcast {root}": lambda comm: comm.bcast({"of": comm.rank, "big": b"x" * 70000}, root),
        f"gather {root}": lambda comm: comm.gather(["of", comm.rank], root=root),
        f"scatter {root}": lambda comm: comm.scatter(
            [("of", comm.rank, to) for to in range(comm.size)] if comm.rank == root else None,
            root=root,
        ),
    }


def in_place(comm: Comm) -> Any:
    values = row(comm)
    comm.Allreduce(MPI.IN_PLACE, values, MPI.SUM)
    return values.tolist()


def reductions(name: str, op: MPI.Op) -> dict[str, Callable[[Comm], Any]]:
    return {
        f"Allreduce {name}": lambda comm: filled(
            comm, lambda out: comm.Allreduce(row(comm), out, op)
        ),
        f"Scan {name}": lambda comm: filled(comm, lambda out: comm.Scan(row(comm), out, op)),
        f"Exscan {name}": lambda comm: (
            filled(comm, lambda out: comm.Exscan(row(comm), out, op))
            if comm.rank
            else filled(comm, lambda out: comm.Exscan(row(comm), out, op)) and None
        ),
        f"allreduce {name}": lambda comm: comm.allreduce(comm.rank + 2, op),
        f"scan {name}": lambda comm: comm.scan(comm.rank + 2, op),
        f"exscan {name}": lambda comm: comm.exscan(comm.rank + 2, op),
    }


def same_results() -> None:
    world = MPI.COMM_WORLD
    theirs = world.Dup()
    ours = InterruptibleComm(world.Dup())
    checked = 0

    def check() -> None:
        nonlocal checked
        checked += 1

    ours.check = check
    for name, call in comparisons(world.size).items():
        expected, found = call(theirs), call(ours)
        assert found == expected, f"{name}: {found!r}, mpi4py says {expected!r}"
    assert checked
    assert ours.left == 0
    theirs.Free()
    ours.Free()


def children() -> None:
    """What is made of one can be left too."""
    comm = InterruptibleComm(MPI.COMM_WORLD.Dup())
    is_over = False

    def check() -> None:
        if is_over:
            raise Left

    comm.check = check
    everybody = comm.Get_group()
    made: list[Any] = [
        MPI.Intracomm.Dup(comm),  # for comparison: mpi4py's own
        comm.Dup(),
        comm.Clone(),
        comm.Split(comm.rank % 2, -comm.rank),
        comm.Split_type(MPI.COMM_TYPE_SHARED),
        comm.Create_group(everybody),
        comm.Create(everybody),
        comm.Dup().Split(0, comm.rank),
    ]
    alone = comm.Split(MPI.UNDEFINED if comm.rank else 0)
    assert (alone == MPI.COMM_NULL) == (comm.rank != 0)
    halves = made[3]
    assert halves.size == len(range(comm.rank % 2, comm.size, 2))
    is_over = True
    for child in made[1:]:
        assert isinstance(child, InterruptibleComm)
        assert leaves(lambda child=child: child.recv(source=child.rank))
    MPI.COMM_WORLD.Barrier()
    for child in made:
        child.Free()
    comm.Free()


def raise_left() -> None:
    raise Left


def leaves(wait: Callable[[], object]) -> bool:
    try:
        wait()
    except Left:
        return True
    return False


BIG = 1 << 22
WAITS: dict[str, Callable[[Comm], object]] = {
    # Rank 0 takes no part in any of these, and rank 1 cannot do without it.
    "Barrier": lambda comm: comm.Barrier(),
    "barrier": lambda comm: comm.barrier(),
    "Bcast": lambda comm: comm.Bcast(np.zeros(3), 0),
    "Gather": lambda comm: comm.Gather(np.zeros(3), np.zeros(6), 1),
    "Gatherv": lambda comm: comm.Gatherv(np.zeros(3), [np.zeros(6), [3, 3]], 1),
    "Scatter": lambda comm: comm.Scatter(None, np.zeros(3), 0),
    "Scatterv": lambda comm: comm.Scatterv(None, np.zeros(3), 0),
    "Allgather": lambda comm: comm.Allgather(np.zeros(3), np.zeros(6)),
    "Allgatherv": lambda comm: comm.Allgatherv(np.zeros(3), np.zeros(6)),
    "Alltoall": lambda comm: comm.Alltoall(np.zeros(2), np.zeros(2)),
    "Reduce": lambda comm: comm.Reduce(np.zeros(3), np.zeros(3), MPI.SUM, 1),
    "Allreduce": lambda comm: comm.Allreduce(np.zeros(3), np.zeros(3)),
    "Reduce_scatter": lambda comm: comm.Reduce_scatter(np.zeros(2), np.zeros(1)),
    "Reduce_scatter_block": lambda comm: comm.Reduce_scatter_block(np.zeros(2), np.zeros(1)),
    "Scan": lambda comm: comm.Scan(np.zeros(3), np.zeros(3)),
    "Exscan": lambda comm: comm.Exscan(np.zeros(3), np.zeros(3)),
    "bcast": lambda comm: comm.bcast(None, 0),
    "gather": lambda comm: comm.gather(1, 1),
    "scatter": lambda comm: comm.scatter(None, 0),
    "allgather": lambda comm: comm.allgather(1),
    "alltoall": lambda comm: comm.alltoall([1, 2]),
    "reduce": lambda comm: comm.reduce(1, root=1),
    "allreduce": lambda comm: comm.allreduce(1),
    "scan": lambda comm: comm.scan(1),
    "exscan": lambda comm: comm.exscan(1),
    "Recv": lambda comm: comm.Recv(np.zeros(3), 0, 3),
    "recv": lambda comm: comm.recv(None, 0, 3),
    "Probe": lambda comm: comm.Probe(0, 3),
    "probe": lambda comm: comm.probe(0, 3),
    "Mprobe": lambda comm: comm.Mprobe(0, 3),
    "mprobe": lambda comm: comm.mprobe(0, 3),
    "Send": lambda comm: comm.Send(np.zeros(BIG), 0),
    "Ssend": lambda comm: comm.Ssend(np.zeros(3), 0),
    "send": lambda comm: comm.send(bytes(8 * BIG), 0),
    "ssend": lambda comm: comm.ssend(1, 0),
    "Sendrecv": lambda comm: comm.Sendrecv(np.zeros(3), 0, 3, np.zeros(3), 0, 3),
    "Sendrecv_replace": lambda comm: comm.Sendrecv_replace(np.zeros(3), 0, 3, 0, 3),
    "sendrecv": lambda comm: comm.sendrecv(1, 0, 3, None, 0, 3),
}


def every_wait_can_be_left() -> None:
    world = MPI.COMM_WORLD
    assert world.size == 2
    kept = []
    for name, wait in WAITS.items():
        comm = InterruptibleComm(world.Dup())
        kept.append(comm)
        end = time.monotonic() + 0.02

        def check(end: float = end) -> None:
            if time.monotonic() > end:
                raise Left

        comm.check = check
        if world.rank == 1:
            assert leaves(lambda wait=wait, comm=comm: wait(comm)), f"{name} was not left"
        world.Barrier()
    # A receive that was left takes no later message.
    comm = InterruptibleComm(world.Dup())
    if world.rank == 1:
        comm.check = raise_left
        assert leaves(lambda: comm.Recv(np.zeros(1), 0, 3))
        assert leaves(lambda: comm.recv(source=0, tag=4))
        assert comm.left == 0
        comm.check = None
    world.Barrier()
    if world.rank == 0:
        comm.Send(np.array([7.0]), 1, 3)
        comm.send("eight", 1, 4)
    else:
        comm.Recv(number := np.zeros(1), 0, 3)
        assert number[0] == 7.0
        assert comm.recv(source=0, tag=4) == "eight"
    comm.Free()


EXCEPTIONS = {
    # Complete without the other side, or are about topologies, windows and other programs.
    *("Bsend", "bsend", "Buffer_detach", "Buffer_flush", "Rsend", "rsend"),
}
COMMUNICATING = (
    *(
        "send",
        "recv",
        "probe",
        "barrier",
        "bcast",
        "gather",
        "scatter",
        "alltoall",
        "reduce",
        "scan",
    ),
)


def no_wait_was_forgotten() -> None:
    """Each method of mpi4py that waits for other ranks has its interruptible form."""
    forgotten = []
    for name, _ in inspect.getmembers(MPI.Intracomm, callable):
        lower = name.lower()
        waits = any(word in lower for word in COMMUNICATING)
        starts = name[0] in "Ii" and hasattr(MPI.Intracomm, name[1].upper() + name[2:])
        starts |= lower.endswith("_init") or lower in ("improbe", "iprobe", "ibsend", "irsend")
        other = "neighbor" in lower or name in EXCEPTIONS or name.startswith("_")
        if waits and not starts and not other and name not in vars(InterruptibleComm):
            forgotten.append(name)
    assert not forgotten, f"these cannot be left: {forgotten}"
    assert "torch" not in sys.modules
