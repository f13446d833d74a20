"""The tables of ``results.h5``: their columns, and the whole of them as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LAYOUT_VERSION = 1
"""Raised when a table or column changes its meaning or goes away; new ones do not count."""

Table = npt.NDArray[np.void]
Attribute = str | int | float

TRIAL_COLUMNS = (
    ("id", "i8"),
    ("status", "S9"),
    ("rung", "i8"),
    ("epochs", "i8"),
    ("best", "f8"),
    ("last", "f8"),
    ("ranks", "i8"),
    ("seconds", "f8"),
)
"""Highest rung tried (-1: none), epochs completed, best and last objective (NaN: none), ranks last
held, seconds in evaluations. Then ``error`` (one line), one column per hyper-parameter, ``config``
(all of the configuration as JSON)."""

EVALUATIONS = np.dtype(
    [
        ("trial", "i8"),
        ("rung", "i8"),
        ("start", "i8"),
        ("stop", "i8"),
        ("first_rank", "i8"),
        ("ranks", "i8"),
        ("t_start", "f8"),
        ("t_stop", "f8"),
        ("resplit", "f8"),
        ("restore", "f8"),
        ("train", "f8"),
        ("save", "f8"),
        ("objective", "f8"),
        ("ending", "S11"),
    ]
)
"""Times in seconds since the job's start, parts in seconds; objective NaN unless finished."""

EVALUATION_RANKS = np.dtype([("evaluation", "i8"), ("first_rank", "i8"), ("ranks", "i8")])
"""World ranks of the evaluation (a row of ``/evaluations``) in runs of consecutive ones."""

CURVE = np.dtype([("trial", "i8"), ("epoch", "i8"), ("value", "f8"), ("seconds", "f8")])
"""Seconds since the evaluation's training function was entered."""

LADDER = np.dtype(
    [
        ("rung", "i8"),
        ("start", "i8"),
        ("stop", "i8"),
        ("planned", "i8"),
        ("evaluated", "i8"),
        ("failed", "i8"),
        ("promoted", "i8"),
        ("best", "f8"),
        ("t_closed", "f8"),
    ]
)
"""Trials by what became of them; t_closed is NaN while the rung is open."""

RANK_COLUMNS = ("rank", "node", "busy", "resplit", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All tables at one moment; text is UTF-8 in fixed-length bytes."""

    attributes: Mapping[str, Attribute]
    """layout, experiment, seed, versions (JSON), metric, mode, reason, wall_seconds."""
    trials: Table
    """One row per trial, by id."""
    curves: Mapping[str, Table]
    """Metric to its values in the order of the outcomes."""
    evaluations: Table
    """One row per outcome, in their order."""
    evaluation_ranks: Table
    ranks: Table
    """One row per world rank: rank, node, and the job's seconds by what the rank did."""
    ladder: Table
