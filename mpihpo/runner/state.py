"""A trial's state in host memory: taken from live objects, kept, and put back.

What ``trial.attach`` was given is taken apart into a skeleton (nested containers and plain values,
as `state_dict` returns them) and leaves (tensors and arrays), so that the skeleton travels as one
small message and each leaf as plain bytes. torch is used only where it is loaded already.
"""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpihpo.errors import StateError

GENERATORS = "_generators"
"""Name of the part that holds the states of the random generators."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Place of a tensor or array in a skeleton."""

    index: int
    is_tensor: bool
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The state of one attached object."""

    skeleton: bytes
    """Pickled: the containers with a `Leaf` where a tensor or array was."""
    leaves: list[Any]
    """Host tensors and arrays, contiguous, by `Leaf.index`."""

    @property
    def nbytes(self) -> int:
        """Size of the leaves in bytes."""
        return sum(as_bytes(leaf).nbytes for leaf in self.leaves)

    def tree(self) -> Any:
        """The state as `state_dict` gave it, with the leaves in place."""
        return _map(pickle.loads(self.skeleton), lambda leaf: self.leaves[leaf.index], Leaf)

    def copied(self) -> Part:
        """The same in memory of its own."""
        leaves = [leaf.clone() if _is_tensor(leaf) else leaf.copy() for leaf in self.leaves]
        return Part(self.skeleton, leaves)


@dataclass(frozen=True, slots=True)
class KeptState:
    """All attached state of one trial after ``epoch`` completed epochs."""

    trial_id: int
    epoch: int
    parts: Mapping[str, Part]

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 only where nothing was attached."""
        return sum(part.nbytes + len(part.skeleton) for part in self.parts.values())

    @property
    def fingerprint(self) -> int:
        """A CRC-32 over every skeleton and leaf: equal for equal states."""
        crc = zlib.crc32(f"{self.trial_id}:{self.epoch}".encode())
        for name in sorted(self.parts):
            part = self.parts[name]
            crc = zlib.crc32(part.skeleton, zlib.crc32(name.encode(), crc))
            for leaf in part.leaves:
                crc = zlib.crc32(as_bytes(leaf), crc)
        return crc


class Keeper:
    """The states that this rank keeps for trials which may go on, newest and older."""

    def __init__(self) -> None:
        self._states: dict[int, dict[int, KeptState]] = {}

    def put(self, state: KeptState) -> None:
        """Keep a state beside older ones of the same trial, until told to forget them."""
        self._states.setdefault(state.trial_id, {})[state.epoch] = state

    def get(self, trial_id: int, epoch: int) -> KeptState | None:
        """The state of a trial after ``epoch`` epochs, if it is here."""
        return self._states.get(trial_id, {}).get(epoch)

    def forget(self, trial_id: int, *, before: int | None = None, epoch: int | None = None) -> None:
        """Forget a trial: all of it, what is older than ``before``, or what is of ``epoch``."""
        states = self._states.get(trial_id, {})
        for each in list(states):
            if (before is None or each < before) and (epoch is None or each == epoch):
                del states[each]
        if not states:
            self._states.pop(trial_id, None)

    @property
    def nbytes(self) -> int:
        """Size of everything kept."""
        return sum(state.nbytes for states in self._states.values() for state in states.values())

    def __len__(self) -> int:
        """Number of kept states."""
        return sum(len(states) for states in self._states.values())


# Taking apart and putting together.


def check_attachable(name: str, thing: object) -> None:
    """Refuse what has no state that could be kept.

    Raises:
        StateError: Names it and what would be right.
    """
    if name == GENERATORS:
        raise StateError(f"attach({name}=...): this name is taken; use another one")
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return
    if isinstance(thing, np.ndarray) or _is_tensor(thing):
        return
    raise StateError(
        f"attach({name}=...): {type(thing).__name__} has no state_dict and load_state_dict; "
        f"expected an object that has both, or an array or tensor"
    )


def take(thing: Any, *, copy: bool) -> Part:
    """The state of an attached object; with ``copy`` it shares no memory with it."""
    is_plain = isinstance(thing, np.ndarray) or _is_tensor(thing)
    return take_tree(thing if is_plain else thing.state_dict(), copy=copy)


def take_tree(tree: Any, *, copy: bool) -> Part:
    """Nested containers taken apart."""
    leaves: list[Any] = []

    def place(value: Any) -> Any:
        if isinstance(value, np.ndarray) and not _is_plain_memory(value.dtype):
            return value  # it travels in the skeleton
        leaf = _on_host(value, copy=copy)
        leaves.append(leaf)
        return Leaf(len(leaves) - 1, _is_tensor(leaf), str(leaf.dtype), tuple(leaf.shape))

    kinds = (np.ndarray, *_tensor_types())
    skeleton = pickle.dumps(_map(tree, place, kinds))
    return Part(skeleton, leaves)


def put_back(name: str, thing: Any, part: Part) -> None:
    """Load a state into an attached object.

    Raises:
        StateError: It does not fit.
    """
    tree = part.tree()
    try:
        if isinstance(thing, np.ndarray):
            if thing.shape != tree.shape or thing.dtype != tree.dtype:
                kept, given = _describe(tree), _describe(thing)
                raise ValueError(f"kept {kept}, given {given}")
            thing[...] = tree
        elif _is_tensor(thing):
            if thing.shape != tree.shape:
                raise ValueError(f"kept {_describe(tree)}, given {_describe(thing)}")
            thing.detach().copy_(tree)
        else:
            thing.load_state_dict(tree)
    except Exception as error:
        line = " ".join(str(error).split())
        raise StateError(f"attach({name}=...): the kept state does not fit: {line}") from error


def empty_like(skeleton: bytes) -> Part:
    """A part with leaves of the right kind and size, to receive into."""
    leaves: list[Any] = []

    def make(leaf: Leaf) -> None:
        if leaf.is_tensor:
            import torch  # a training function may import it only later

            dtype = getattr(torch, leaf.dtype.removeprefix("torch."))
            leaves.append(torch.empty(leaf.shape, dtype=dtype, device="cpu"))
        else:
            leaves.append(np.empty(leaf.shape, dtype=np.dtype(leaf.dtype)))

    _map(pickle.loads(skeleton), make, Leaf)
    return Part(skeleton, leaves)


def as_bytes(leaf: Any) -> memoryview:
    """The memory of a host leaf, writable."""
    if _is_tensor(leaf):
        torch = sys.modules["torch"]
        flat = leaf.detach().reshape(-1)
        leaf = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return memoryview(leaf.reshape(-1).view(np.uint8))


def take_generators() -> Part:
    """The states of the global generators of Python, numpy and torch."""
    tree: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    if (torch := sys.modules.get("torch")) is not None:
        tree["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            tree["cuda"] = torch.cuda.get_rng_state()
    return take_tree(tree, copy=True)


def put_back_generators(part: Part) -> None:
    """Continue the global generators where they were."""
    tree = part.tree()
    random.setstate(tree["python"])
    np.random.set_state(tree["numpy"])
    if "torch" in tree and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(tree["torch"])
        if "cuda" in tree and torch.cuda.is_available():
            torch.cuda.set_rng_state(tree["cuda"])


def _map(tree: Any, function: Any, kinds: Any) -> Any:
    if isinstance(tree, kinds):
        return function(tree)
    if isinstance(tree, dict):
        mapped = {key: _map(value, function, kinds) for key, value in tree.items()}
        return mapped if type(tree) is dict else _same_type(tree, mapped)
    if isinstance(tree, (list, tuple)):
        items = [_map(value, function, kinds) for value in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    return tree


def _same_type(tree: dict[Any, Any], mapped: dict[Any, Any]) -> Any:
    # OrderedDict (of modules) may carry attributes such as _metadata, which loading uses.
    try:
        result = type(tree)(mapped)
    except TypeError:
        return mapped
    if metadata := getattr(tree, "_metadata", None):
        result._metadata = metadata  # type: ignore[attr-defined]
    return result


def _on_host(value: Any, *, copy: bool) -> Any:
    if isinstance(value, np.ndarray):
        return np.array(value, order="C") if copy else np.asarray(value, order="C")
    host = value.detach().to("cpu")
    if copy and host.data_ptr() == value.data_ptr():
        host = host.clone()
    return host.contiguous()


def _is_plain_memory(dtype: np.dtype[Any]) -> bool:
    """Whether the name of the type says all of it, and its values are bytes."""
    return not dtype.hasobject and dtype.names is None and dtype.itemsize > 0


def _tensor_types() -> tuple[type, ...]:
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.Tensor,)


def _is_tensor(value: object) -> bool:
    return isinstance(value, _tensor_types())


def _describe(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"


def walk(parts: Mapping[str, Part]) -> Iterator[Any]:
    """Every leaf of several parts, in an order that is equal on all ranks."""
    for name in sorted(parts):
        yield from parts[name].leaves
