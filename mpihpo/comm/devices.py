"""Which backend and which GPU a rank gets: a pure decision from what the rank sees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mpihpo.errors import ExperimentError

_WHERE = "process_group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What one rank sees of its node."""

    visible_gpus: int
    """GPUs that this process may use; a launcher may hide the others of the node."""
    ranks_on_node: int
    """Ranks of this node that train."""
    local_rank: int
    """This rank's place among them."""
    has_nccl: bool
    """Whether this torch has NCCL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """What one rank gets."""

    backend: str | None
    """``nccl``, ``gloo``, or None for no process group."""
    gpu: int | None
    """Index among the visible GPUs; None for the CPU."""
    warning: str | None = None
    """What the user should know, for one line in the log."""


def place_on_node(node_of: Sequence[int], rank: int, ranks: Collection[int]) -> tuple[int, int]:
    """A rank's place among those of ``ranks`` on its node, and how many they are.

    Args:
        node_of: Node index per world rank.
        rank: One of ``ranks``.
        ranks: World ranks that count; a coordinator that does not train needs no GPU.
    """
    neighbours = [other for other in sorted(ranks) if node_of[other] == node_of[rank]]
    return neighbours.index(rank), len(neighbours)


def choose_device(wanted: str, seen: Surroundings) -> DeviceChoice:
    """Backend and GPU of one rank.

    NCCL needs a GPU of its own for every rank. One visible GPU is the rank's own, whatever its
    number; of several the place on the node picks one.

    Args:
        wanted: ``auto``, ``nccl``, ``gloo`` or ``none``.
        seen: What the rank sees.

    Raises:
        ExperimentError: ``nccl`` is wanted and cannot work here.
    """
    if wanted == "none":
        return DeviceChoice(backend=None, gpu=None)
    gpus, ranks = seen.visible_gpus, seen.ranks_on_node
    if wanted == "nccl":
        _check_nccl(seen)
    if gpus == 0:
        return DeviceChoice(backend="gloo", gpu=None)
    gpu = seen.local_rank % gpus
    if wanted == "gloo":
        return DeviceChoice(backend="gloo", gpu=gpu)
    if gpus >= ranks:
        return DeviceChoice(backend="nccl" if seen.has_nccl else "gloo", gpu=gpu)
    return DeviceChoice(
        backend="nccl" if wanted == "nccl" else "gloo", gpu=gpu, warning=_shortage(wanted, seen)
    )


def agree_on_backend(choices: Iterable[DeviceChoice]) -> str | None:
    """The backend of all ranks: what they all chose, or gloo, which works on any of them."""
    backends = {choice.backend for choice in choices}
    return backends.pop() if len(backends) == 1 else "gloo"


def _check_nccl(seen: Surroundings) -> None:
    gpus, ranks = seen.visible_gpus, seen.ranks_on_node
    if not seen.has_nccl:
        problem = "'nccl' is not part of this torch; expected auto, gloo or none"
        raise ExperimentError(_WHERE, problem)
    # A single visible GPU may be each rank's own; with two or more for too many ranks, some share.
    if gpus < ranks and gpus != 1:
        found = f"{ranks} ranks of a node see {gpus} GPUs" if gpus else "a rank sees none"
        problem = f"'nccl' needs a GPU for each rank, and {found}; expected auto or gloo"
        raise ExperimentError(_WHERE, problem)


def _shortage(wanted: str, seen: Surroundings) -> str:
    ranks = seen.ranks_on_node
    if seen.visible_gpus > 1:
        return (
            f"{ranks} ranks of a node share {seen.visible_gpus} GPUs, so gloo is used, not NCCL: "
            f"start one rank per GPU"
        )
    effect = "NCCL fails if it is the same" if wanted == "nccl" else "so gloo is used, not NCCL"
    return (
        f"each of a node's {ranks} ranks sees one GPU, {effect}: "
        f"if the launcher hides the node's other GPUs, let every rank see all of them"
    )
