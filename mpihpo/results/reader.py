"""Reads what a run left behind, while it runs or afterwards; needs no MPI and takes no locks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpihpo.errors import ResultsError
from mpihpo.records import Ending, Objective
from mpihpo.results.encoding import from_json
from mpihpo.results.layout import (
    CURVE,
    EVALUATION_RANKS,
    EVALUATIONS,
    LADDER,
    LAYOUT_VERSION,
    RANK_COLUMNS,
    TRIAL_COLUMNS,
    Attribute,
    Snapshot,
    Table,
)
from mpihpo.results.tables import ResultTables

_COLUMNS = {
    "trials": {"error", "config", *(name for name, _ in TRIAL_COLUMNS)},
    "evaluations": set(EVALUATIONS.names or ()),
    "evaluation_ranks": set(EVALUATION_RANKS.names or ()),
    "ranks": set(RANK_COLUMNS),
    "ladder": set(LADDER.names or ()),
}
_ATTRIBUTES = ("experiment", "seed", "versions", "metric", "mode", "reason", "wall_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best trial: trained longest, then with the best objective, then with the lowest id."""

    trial: int
    """Its id."""
    config: dict[str, Any]
    objective: float
    epochs: int
    """Completed when it had this objective."""
    ranks: int
    """Number of ranks that trained it last."""


class Results:
    """The results of one experiment.

    Tables are structured numpy arrays, text in them is ``str``; ``layout`` tells their columns.

    Args:
        path: The output folder of a run, or a ``results.h5``.

    Raises:
        ResultsError: There is no such file, or it is broken, foreign or of a newer layout.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        location = Path(path)
        file = location / "results.h5" if location.is_dir() else location
        self._folder: Path | None = file.parent
        self._snapshot = _read(file)

    @classmethod
    def from_tables(
        cls, tables: ResultTables, folder: str | os.PathLike[str] | None = None
    ) -> Results:
        """The results without a file; ``folder`` is where the run left one, if it did."""
        results = cls.__new__(cls)
        results._folder = None if folder is None else Path(folder)
        results._snapshot = tables.snapshot()
        return results

    @property
    def best(self) -> Best | None:
        """The best trial; None when no evaluation has finished."""
        rows = self._snapshot.evaluations
        finished = rows[rows["ending"] == Ending.FINISHED.value.encode()]
        if not len(finished):
            return None
        objective = finished["objective"]
        keys = objective if self.objective.mode == "min" else -objective
        first = finished[np.lexsort((finished["trial"], keys, -finished["stop"]))[0]]
        return Best(
            trial=int(first["trial"]),
            config=self.config(int(first["trial"])),
            objective=float(first["objective"]),
            epochs=int(first["stop"]),
            ranks=int(first["ranks"]),
        )

    def config(self, trial: int) -> dict[str, Any]:
        """The configuration of a trial, its values as the training function saw them.

        Raises:
            ResultsError: There is no such trial.
        """
        trials = self._snapshot.trials
        rows = np.flatnonzero(trials["id"] == trial)
        if not len(rows):
            raise ResultsError(f"trial {trial}: not among the {len(trials)} trials of the results")
        config: dict[str, Any] = from_json(trials["config"][rows[0]])
        return config

    @property
    def trials(self) -> Table:
        """One row per trial, by id."""
        return _with_text(self._snapshot.trials)

    @property
    def evaluations(self) -> Table:
        """One row per evaluation, in the order in which they ended."""
        return _with_text(self._snapshot.evaluations)

    @property
    def evaluation_ranks(self) -> Table:
        """The ranks of each evaluation (a row of ``evaluations``) as runs of consecutive ones."""
        return self._snapshot.evaluation_ranks

    @property
    def ranks(self) -> Table:
        """One row per world rank: its node, and its seconds busy, in re-splits and idle."""
        return _with_text(self._snapshot.ranks)

    @property
    def ladder(self) -> Table:
        """One row per rung, as planned and as realised."""
        return self._snapshot.ladder

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all reported metrics."""
        return tuple(self._snapshot.curves)

    def curves(self, metric: str | None = None) -> Table:
        """All values of a metric, of the objective's by default.

        Raises:
            ResultsError: Nobody reported this metric.
        """
        if metric is None and self.objective.metric not in self._snapshot.curves:
            return np.zeros(0, CURVE)
        name = self.objective.metric if metric is None else metric
        if name not in self._snapshot.curves:
            raise ResultsError(
                f"metric {name!r}: reported were {', '.join(self.metrics) or 'none'}"
            )
        return self._snapshot.curves[name]

    @property
    def objective(self) -> Objective:
        """The metric that decided, and which way."""
        attributes = self._snapshot.attributes
        return Objective(metric=str(attributes["metric"]), mode=str(attributes["mode"]))

    @property
    def reason(self) -> str:
        """Why the job ended; empty while it runs."""
        return str(self._snapshot.attributes["reason"])

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return int(self._snapshot.attributes["seed"])

    @property
    def experiment_text(self) -> str:
        """The effective experiment as YAML."""
        return str(self._snapshot.attributes["experiment"])

    @property
    def versions(self) -> dict[str, str]:
        """Versions of mpihpo and of the libraries under it."""
        versions: dict[str, str] = from_json(str(self._snapshot.attributes["versions"]))
        return versions

    @property
    def wall_seconds(self) -> float:
        """Length of the job, so far."""
        return float(self._snapshot.attributes["wall_seconds"])

    @property
    def utilisation(self) -> float:
        """Rank-seconds in training functions over all rank-seconds of the job, 0 to 1."""
        available = len(self._snapshot.ranks) * self.wall_seconds
        return float(self._snapshot.ranks["busy"].sum()) / available if available > 0 else 0.0

    @property
    def checkpoint(self) -> Path | None:
        """The best trial's checkpoint, if there is one.

        ``best.pt`` for ``torch.load(..., weights_only=True)``, or ``best.npz`` for `numpy.load`
        where torch was not used.
        """
        if self._folder is None:
            return None
        paths = [self._folder / "checkpoints" / name for name in ("best.pt", "best.npz")]
        return next((path for path in paths if path.is_file()), None)

    def summary(self) -> str:
        """The realised ladder and the best configuration as plain text of several lines."""
        from mpihpo.results.summary import summarise

        return summarise(self)


def _with_text(table: Table) -> Table:
    """The table with its bytes as text."""
    assert table.dtype.names is not None
    names = table.dtype.names
    columns = [
        np.char.decode(table[name], "utf-8") if table.dtype[name].kind == "S" else table[name]
        for name in names
    ]
    decoded: Table = np.zeros(
        len(table),
        dtype=[(name, column.dtype) for name, column in zip(names, columns, strict=True)],
    )
    for name, column in zip(names, columns, strict=True):
        decoded[name] = column
    return decoded


def _read(path: Path) -> Snapshot:
    import h5py

    if not path.is_file():
        raise ResultsError(f"{path}: no such file; a run writes it at the end of its first rung")
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _snapshot(path, file)
    except ResultsError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ResultsError(f"{path}: is no readable results file: {reason}") from error


def _snapshot(path: Path, file: Any) -> Snapshot:
    layout = file.attrs.get("layout")
    if layout is None:
        raise ResultsError(f"{path}: is an HDF5 file, but not one that mpihpo wrote")
    if int(layout) > LAYOUT_VERSION:
        raise ResultsError(
            f"{path}: has layout {int(layout)}, this mpihpo reads up to {LAYOUT_VERSION}: "
            "use the mpihpo that wrote it or a newer one"
        )
    attributes: Mapping[str, Attribute] = {
        "layout": int(layout),
        **{name: _attribute(file.attrs[name]) for name in _ATTRIBUTES},
    }
    tables = {name: _plain_table(file[name]) for name in _COLUMNS}
    for name, columns in _COLUMNS.items():
        missing = sorted(columns - set(tables[name].dtype.names or ()))
        if missing:
            raise ResultsError(f"{path}: /{name} lacks the columns {', '.join(missing)}")
    curves = {
        str(dataset.attrs["metric"]): _plain_table(dataset) for dataset in file["curves"].values()
    }
    return Snapshot(attributes=attributes, curves=curves, **tables)


def _attribute(value: Any) -> Attribute:
    plain: Attribute = value.item() if isinstance(value, np.generic) else value
    return plain


def _plain_table(dataset: Any) -> Table:
    """The rows, their dtype without h5py's own marks, which pickling would warn about."""
    rows = dataset[()]
    dtype = [(name, rows.dtype[name].str) for name in rows.dtype.names]
    plain: Table = rows.astype(np.dtype(dtype))
    return plain
