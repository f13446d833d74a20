"""A trial's kept state on disk, from which a later job goes on.

One ``.npz`` file per state: the leaves as plain bytes, the rest as JSON with tags for what it
lacks. Nothing in it is ever unpickled, so a run's folder may come from anybody; every member of the
archive carries a CRC-32, and the trial and epoch stand inside, so that a damaged or misplaced file
is refused.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mpihpo.errors import CheckpointError, StateError
from mpihpo.runner.state import KeptState, Leaf, Part, as_bytes, empty_like

LAYOUT = 1
_NAME = re.compile(r"trial-(\d+)-epoch-(\d+)\.npz")
_PLAIN = (bool, int, float, str)


def state_path(folder: Path, trial_id: int, epoch: int) -> Path:
    """Where the state of a trial after ``epoch`` epochs is."""
    return folder / f"trial-{trial_id}-epoch-{epoch}.npz"


def saved_states(folder: Path) -> Iterable[tuple[int, int]]:
    """Trial and epoch of every saved state in a folder."""
    for path in sorted(folder.glob("trial-*.npz")):
        if match := _NAME.fullmatch(path.name):
            yield int(match[1]), int(match[2])


def remove_partial(folder: Path) -> None:
    """Delete what killed jobs have left half-written; nobody else may write there now."""
    for path in folder.glob(".trial-*.npz.*"):
        with suppress(OSError):
            path.unlink()


def write_state(folder: Path, state: KeptState) -> Path:
    """Write a state; it appears under its name only when it is whole and on the disk.

    Raises:
        StateError: Something attached cannot be saved; names it.
        OSError: The file cannot be written.
    """
    parts = {}
    arrays: dict[str, Any] = {}
    for number, (name, part) in enumerate(state.parts.items()):
        parts[name] = {"number": number, "tree": _encode(name, pickle.loads(part.skeleton))}
        for index, leaf in enumerate(part.leaves):
            arrays[f"{number}-{index}"] = np.frombuffer(as_bytes(leaf), np.uint8)
    header = {
        "layout": LAYOUT,
        "trial": state.trial_id,
        "epoch": state.epoch,
        "parts": parts,
    }
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)  # not its parent: a run whose folder is gone must be told
    path = state_path(folder, state.trial_id, state.epoch)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            np.savez(file, header=np.frombuffer(text, np.uint8), **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_state(folder: Path, trial_id: int, epoch: int) -> KeptState:
    """Read a state back.

    Raises:
        CheckpointError: It is missing, damaged, or of another trial or epoch.
    """
    path = state_path(folder, trial_id, epoch)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            header = json.loads(archive["header"].tobytes())
            if header["layout"] != LAYOUT:
                raise CheckpointError(f"{path}: has layout {header['layout']}, expected {LAYOUT}")
            if (header["trial"], header["epoch"]) != (trial_id, epoch):
                raise CheckpointError(
                    f"{path}: holds trial {header['trial']} after epoch {header['epoch']}, "
                    f"expected trial {trial_id} after epoch {epoch}"
                )
            parts = {
                name: _read_part(archive, part["number"], part["tree"])
                for name, part in header["parts"].items()
            }
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is not there") from None
    except Exception as error:  # damage in a zip file shows itself in many ways
        line = " ".join(str(error).split())
        raise CheckpointError(f"{path}: is damaged: {type(error).__name__}: {line}") from error
    return KeptState(trial_id, epoch, parts)


def _read_part(archive: Any, number: int, tree: Any) -> Part:
    part = empty_like(pickle.dumps(_decode(tree)))
    for index, leaf in enumerate(part.leaves):
        memory = as_bytes(leaf)
        stored = archive[f"{number}-{index}"]
        if stored.nbytes != memory.nbytes:
            raise ValueError(f"array {number}-{index} has {stored.nbytes} bytes")
        memory[:] = stored.data
    return part


def _encode(name: str, tree: Any) -> Any:
    """A tree as JSON values: plain ones as they are, the others as ``[tag, value]``."""
    if tree is None or type(tree) in _PLAIN:
        return tree
    if isinstance(tree, Leaf):
        return ["leaf", [tree.index, tree.is_tensor, tree.dtype, list(tree.shape)]]
    if isinstance(tree, np.generic) and tree.dtype.names is None and not tree.dtype.hasobject:
        return ["scalar", [tree.dtype.str, _text(tree.tobytes())]]
    if type(tree) in (dict, OrderedDict):
        items = [[_encode(name, key), _encode(name, value)] for key, value in tree.items()]
        if type(tree) is dict:
            return ["dict", items]
        return ["ordered", items, _encode(name, getattr(tree, "_metadata", None))]
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        tag = "list" if isinstance(tree, list) else "tuple"
        return [tag, [_encode(name, value) for value in tree]]
    if isinstance(tree, bytes):
        return ["bytes", _text(tree)]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tree, (torch.dtype, torch.device)):
        return [type(tree).__name__, str(tree)]
    raise StateError(
        f"attach({name}=...): its state holds a {type(tree).__name__}, which cannot be saved; "
        f"expected tensors, arrays, numbers, text, None and lists, tuples and dicts of them"
    )


def _text(content: bytes) -> str:
    return base64.b85encode(content).decode()


def _decode(tree: Any) -> Any:
    if not isinstance(tree, list):
        return tree
    tag, value = tree[0], tree[1]
    if tag == "leaf":
        return Leaf(value[0], value[1], value[2], tuple(value[3]))
    if tag == "dict":
        return {_decode(key): _decode(item) for key, item in value}
    if tag == "ordered":
        ordered: OrderedDict[Any, Any] = OrderedDict((_decode(k), _decode(v)) for k, v in value)
        if (metadata := _decode(tree[2])) is not None:
            ordered._metadata = metadata  # type: ignore[attr-defined]
        return ordered
    if tag == "list":
        return [_decode(item) for item in value]
    if tag == "tuple":
        return tuple(_decode(item) for item in value)
    if tag == "bytes":
        return base64.b85decode(value)
    if tag == "scalar":
        return np.frombuffer(base64.b85decode(value[1]), np.dtype(value[0]))[0]
    import torch

    if tag == "dtype":
        return getattr(torch, value.removeprefix("torch."))
    if tag == "device":
        return torch.device(value)
    raise ValueError(f"unknown tag {tag}")
