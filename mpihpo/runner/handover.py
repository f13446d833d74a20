"""State from rank to rank: between groups by messages, within a group by broadcast.

Metadata goes as one small object over MPI, the leaves as plain memory: over the process group where
there is one (NCCL or gloo), over the group's communicator otherwise. Small leaves are packed, since
each broadcast has a price of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpihpo.comm.mailbox import FIRST_CHANNEL, Mailbox
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import InternalError
from mpihpo.runner.state import KeptState, Part, as_bytes, empty_like, walk

if TYPE_CHECKING:
    from mpihpo.comm.group import Group

_PACK_BELOW_BYTES = 1 << 23
_PACK_BYTES = 1 << 25
_LARGEST_BYTES = 1 << 28  # gloo and MPI take 32-bit counts, and a GPU needs room for one piece


def channel_of(serial: int, tag_limit: int) -> int:
    """The channel on which the group of this serial receives a kept state.

    A transfer that was left half-way stays unread on its own channel, and meets no later one.
    """
    return FIRST_CHANNEL + serial % (tag_limit - FIRST_CHANNEL)


def send_state(mailbox: Mailbox, state: KeptState | None, rank: int, channel: int) -> None:
    """Send a kept state to a world rank; local, returns at once.

    The other side is `receive_state`. None says that the state is not here.
    """
    if state is None:
        mailbox.post(None, rank, channel)
        return
    skeletons = {name: part.skeleton for name, part in state.parts.items()}
    mailbox.post((state.trial_id, state.epoch, skeletons), rank, channel)
    for leaf in walk(state.parts):
        for piece in _pieces(as_bytes(leaf)):
            mailbox.post_bytes(piece, rank, channel)


def receive_state(
    mailbox: Mailbox, rank: int, channel: int, check: Callable[[], None]
) -> KeptState:
    """Receive a kept state from a world rank, waiting for it.

    Raises:
        InternalError: The other side has none.
    """
    found: list[Any] = []

    def arrived() -> bool:
        mail = mailbox.take(channel)
        if mail is not None:
            found.append(mail[1])
        return mail is not None

    wait_until(arrived, check=check)
    if found[0] is None:
        raise InternalError(f"rank {rank} was to hold a trial's state and does not")
    trial_id, epoch, skeletons = found[0]
    parts = {name: empty_like(skeleton) for name, skeleton in skeletons.items()}
    for leaf in walk(parts):
        for piece in _pieces(as_bytes(leaf)):
            mailbox.receive_bytes(piece, rank, channel, check)
    return KeptState(trial_id, epoch, parts)


def broadcast_parts(
    group: Group, parts: Mapping[str, Part] | None, source: int, device: Any
) -> dict[str, Part]:
    """Give the parts of group rank ``source`` to every member; collective over the group.

    Args:
        group: Two ranks or more.
        parts: On ``source``; ignored elsewhere.
        source: Group rank that has them.
        device: Device of the process group's tensors.
    """
    skeletons = None
    if group.rank == source:
        assert parts is not None
        skeletons = {name: part.skeleton for name, part in parts.items()}
    skeletons = group.comm.bcast(skeletons, source)
    assert skeletons is not None
    if group.rank == source:
        assert parts is not None
        result = dict(parts)
    else:
        result = {name: empty_like(skeleton) for name, skeleton in skeletons.items()}
    send = _process_group_broadcast(device) if group.backend else _mpi_broadcast(group)
    small: list[memoryview] = []
    for leaf in walk(result):
        memory = as_bytes(leaf)
        if memory.nbytes >= _PACK_BELOW_BYTES:
            for piece in _pieces(memory):
                send(piece, source)
            continue
        small.append(memory)
        if sum(each.nbytes for each in small) >= _PACK_BYTES:
            _broadcast_packed(group, small, source, send)
            small = []
    _broadcast_packed(group, small, source, send)
    return result


def _broadcast_packed(
    group: Group,
    memories: list[memoryview],
    source: int,
    send: Callable[[memoryview, int], None],
) -> None:
    total = sum(memory.nbytes for memory in memories)
    if not total:
        return
    packed = np.empty(total, dtype=np.uint8)
    if group.rank == source:
        np.concatenate([np.frombuffer(memory, np.uint8) for memory in memories], out=packed)
    send(packed.data, source)
    if group.rank != source:
        start = 0
        for memory in memories:
            memory[:] = packed.data[start : start + memory.nbytes]
            start += memory.nbytes


def _pieces(memory: memoryview) -> list[memoryview]:
    """The memory in pieces that a 32-bit count can name; none for empty memory."""
    return [
        memory[start : start + _LARGEST_BYTES] for start in range(0, memory.nbytes, _LARGEST_BYTES)
    ]


def _mpi_broadcast(group: Group) -> Callable[[memoryview, int], None]:
    from mpi4py import MPI

    def send(memory: memoryview, source: int) -> None:
        group.comm.Bcast([memory, MPI.BYTE], source)

    return send


def _process_group_broadcast(device: Any) -> Callable[[memoryview, int], None]:
    import torch
    import torch.distributed as dist

    def send(memory: memoryview, source: int) -> None:
        host = torch.frombuffer(memory, dtype=torch.uint8)
        if device.type == "cpu":
            dist.broadcast(host, source)
            return
        is_source = dist.get_rank() == source
        staged = host.to(device) if is_source else torch.empty_like(host, device=device)
        dist.broadcast(staged, source)
        if not is_source:
            host.copy_(staged)

    return send
