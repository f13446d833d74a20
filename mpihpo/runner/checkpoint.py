"""The best model on disk: a file that ``torch.load(..., weights_only=True)`` reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpihpo.records import Outcome
from mpihpo.runner.state import GENERATORS, KeptState

STEM = "best"


def write_checkpoint(folder: Path, state: KeptState, outcome: Outcome) -> Path:
    """Write ``best.pt``, or ``best.npz`` where torch is not loaded; replaced atomically.

    The file holds a mapping: ``trial``, ``epoch``, ``objective``, ``config`` and ``state``, in
    which each attached object stands under its name as its own `state_dict`. Arrays become tensors,
    since weights-only loading takes no arrays.

    Raises:
        OSError: It could not be written.
    """
    folder.mkdir(exist_ok=True)  # not its parent: a run whose folder is gone must be told
    attached = {name: part.tree() for name, part in state.parts.items() if name != GENERATORS}
    trial = outcome.allocation.evaluation.trial
    torch = sys.modules.get("torch")
    path = folder / f"{STEM}.{'npz' if torch is None else 'pt'}"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            if torch is None:
                np.savez(file, **_flat(attached))
            else:
                content = {
                    "trial": trial.id,
                    "epoch": state.epoch,
                    "objective": outcome.objective,
                    "config": dict(trial.config),
                    "state": _tensors(attached, torch),
                }
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _tensors(tree: Any, torch: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Mapping):
        return {key: _tensors(value, torch) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_tensors(value, torch) for value in tree]
    return tree


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        flat: dict[str, Any] = {}
        for key, value in tree.items():
            flat |= _flat(value, f"{prefix}/{key}" if prefix else str(key))
        return flat
    return {prefix: np.asarray(tree)}
