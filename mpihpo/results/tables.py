"""Builds the tables of ``results.h5`` from records, one record at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpihpo.errors import InternalError
from mpihpo.records import (
    Ending,
    Objective,
    Outcome,
    Report,
    RungPlan,
    RungResult,
    Scalar,
    Status,
    TrialRecord,
)
from mpihpo.results.encoding import runs_of, to_json
from mpihpo.results.layout import (
    CURVE,
    EVALUATION_RANKS,
    EVALUATIONS,
    LADDER,
    LAYOUT_VERSION,
    TRIAL_COLUMNS,
    Attribute,
    Snapshot,
    Table,
)

_ERROR_CHARACTERS = 200


class RankSeconds(NamedTuple):
    """Where each world rank's time went: three float64 arrays of shape (world size,), seconds."""

    busy: npt.NDArray[np.float64]
    """In training functions."""
    resplit: npt.NDArray[np.float64]
    """Building and freeing groups, restoring and keeping state."""
    idle: npt.NDArray[np.float64]
    """The rest of the job."""


class _GrowingTable:
    """Rows at amortised constant cost each."""

    __slots__ = ("_rows", "count")

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._rows: Table = np.zeros(64, dtype)
        self.count = 0

    def append(self, row: tuple[Any, ...]) -> None:
        if self.count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self.count] = row
        self.count += 1

    def rows(self) -> Table:
        return self._rows[: self.count]


class _TrialRow:
    """What is known of one trial so far."""

    __slots__ = ("best", "epochs", "error", "last", "ranks", "record", "rung", "seconds", "status")

    def __init__(self, record: TrialRecord) -> None:
        self.record = record
        self.status = Status.PENDING
        self.rung = -1
        self.epochs = 0
        self.best = math.nan
        self.last = math.nan
        self.ranks = 0
        self.seconds = 0.0
        self.error = ""


class ResultTables:
    """The tables as they grow; ``snapshot`` is what gets written or read.

    Args:
        experiment_text: The effective experiment as YAML.
        seed: The experiment's seed.
        objective: The metric that decides, and which way.
        hyper_parameters: Names of the space, in the order of their columns.
        nodes: Name of the node of each world rank.
        versions: Of mpihpo and of the libraries under it.
    """

    def __init__(
        self,
        experiment_text: str,
        seed: int,
        objective: Objective,
        hyper_parameters: Sequence[str],
        nodes: Sequence[str],
        versions: Mapping[str, str],
    ) -> None:
        self.objective = objective
        self._hyper_parameters = tuple(hyper_parameters)
        self._nodes = tuple(nodes)
        self._attributes: dict[str, Attribute] = {
            "layout": LAYOUT_VERSION,
            "experiment": experiment_text,
            "seed": seed,
            "versions": to_json(dict(versions)),
            "metric": objective.metric,
            "mode": objective.mode,
            "reason": "",
        }
        self._trials: dict[int, _TrialRow] = {}
        self._curves: dict[str, _GrowingTable] = {}
        self._evaluations = _GrowingTable(EVALUATIONS)
        self._evaluation_ranks = _GrowingTable(EVALUATION_RANKS)
        self._ladder: list[dict[str, Any]] = []
        self._rung_stop: dict[int, float] = {}
        self._busy = np.zeros(len(self._nodes))
        self._resplit = np.zeros(len(self._nodes))
        self._wall_seconds = 0.0

    def add_trial(self, trial: TrialRecord) -> None:
        """Take up a trial before its first outcome; ``add`` does it otherwise."""
        if trial.id not in self._trials:
            self._trials[trial.id] = _TrialRow(trial)

    def set_status(self, trial_id: int, status: Status) -> None:
        """What the scheduler says has become of a trial."""
        row = self._trials.get(trial_id)
        if row is None:
            raise InternalError(f"trial {trial_id}: has a status but was never added")
        row.status = status

    def add(self, outcome: Outcome) -> None:
        """Take up one outcome in all tables."""
        allocation, spent = outcome.allocation, outcome.spent
        evaluation = allocation.evaluation
        trial_id = evaluation.trial.id
        moving = spent.resplit + spent.restore + spent.save
        for first, count in runs_of(allocation.ranks):
            self._evaluation_ranks.append((self._evaluations.count, first, count))
            self._busy[first : first + count] += spent.train
            self._resplit[first : first + count] += moving
        self._evaluations.append(
            (
                trial_id,
                evaluation.rung,
                evaluation.start,
                evaluation.stop,
                allocation.leader,
                len(allocation.ranks),
                outcome.t_start,
                outcome.t_stop,
                spent.resplit,
                spent.restore,
                spent.train,
                spent.save,
                math.nan if outcome.objective is None else outcome.objective,
                outcome.ending.value,
            )
        )
        self._add_curves(trial_id, outcome.reports)
        self._add_to_trial(outcome)
        self._wall_seconds = max(self._wall_seconds, outcome.t_stop)
        rung_stop = self._rung_stop.get(evaluation.rung, 0.0)
        self._rung_stop[evaluation.rung] = max(rung_stop, outcome.t_stop)

    def add_ladder(self, planned: Sequence[RungPlan]) -> None:
        """Take up the ladder as it is planned."""
        self._ladder.extend(
            {"rung": plan.rung, "start": plan.start, "stop": plan.stop, "planned": plan.trials}
            for plan in planned
        )

    def add_rung(self, result: RungResult) -> None:
        """Take up a closed rung: the first open planned line like it, else a line of its own."""
        key: dict[str, Any] = {"rung": result.rung, "start": result.start, "stop": result.stop}
        for line in self._ladder:
            if "t_closed" not in line and key.items() <= line.items():
                break
        else:
            line = key
            self._ladder.append(line)
        line.update(
            evaluated=result.evaluated,
            failed=result.failed,
            promoted=len(result.promoted),
            best=math.nan if result.best is None else result.best,
            t_closed=self._rung_stop.get(result.rung, self._wall_seconds),
        )

    def finish(self, reason: str, t_stop: float) -> None:
        """Close the tables: why the job ended, and its length in seconds."""
        self._attributes["reason"] = reason
        self._wall_seconds = t_stop

    @property
    def rank_seconds(self) -> RankSeconds:
        """Where each rank's time went, up to now."""
        idle = np.maximum(self._wall_seconds - self._busy - self._resplit, 0.0)
        return RankSeconds(self._busy.copy(), self._resplit.copy(), idle)

    def snapshot(self) -> Snapshot:
        """All tables as they are now."""
        return Snapshot(
            attributes={**self._attributes, "wall_seconds": self._wall_seconds},
            trials=self._trial_table(),
            curves={metric: curve.rows() for metric, curve in self._curves.items()},
            evaluations=self._evaluations.rows(),
            evaluation_ranks=self._evaluation_ranks.rows(),
            ranks=self._rank_table(),
            ladder=self._ladder_table(),
        )

    def _add_curves(self, trial_id: int, reports: Iterable[Report]) -> None:
        for report in reports:
            for metric, value in report.metrics.items():
                curve = self._curves.get(metric)
                if curve is None:
                    curve = self._curves[metric] = _GrowingTable(CURVE)
                curve.append((trial_id, report.epoch, value, report.seconds))

    def _add_to_trial(self, outcome: Outcome) -> None:
        evaluation = outcome.allocation.evaluation
        self.add_trial(evaluation.trial)
        row = self._trials[evaluation.trial.id]
        row.rung = max(row.rung, evaluation.rung)
        row.ranks = len(outcome.allocation.ranks)
        row.seconds += outcome.t_stop - outcome.t_start
        row.status = Status.FAILED if outcome.ending is Ending.FAILED else Status.PARKED
        if outcome.ending is Ending.FINISHED:
            row.epochs = max(row.epochs, evaluation.stop)
        for report in outcome.reports:
            row.epochs = max(row.epochs, report.epoch)
            value = report.metrics.get(self.objective.metric)
            if value is not None and math.isfinite(value):
                row.last = value
                if not self.objective.key(row.best) <= self.objective.key(value):
                    row.best = value
        if outcome.failure is not None:
            row.error = _one_line(f"{outcome.failure.kind}: {outcome.failure.message}")

    def _trial_table(self) -> Table:
        rows = [self._trials[trial_id] for trial_id in sorted(self._trials)]
        configs = [row.record.config for row in rows]
        columns = [
            ("error", _text([row.error for row in rows])),
            *self._config_columns(configs),
            ("config", _text([to_json(dict(config)) for config in configs])),
        ]
        dtype = [*TRIAL_COLUMNS, *((name, column.dtype) for name, column in columns)]
        table: Table = np.zeros(len(rows), dtype=dtype)
        for name, _ in TRIAL_COLUMNS:
            if name not in ("id", "status"):
                table[name] = [getattr(row, name) for row in rows]
        table["id"] = [row.record.id for row in rows]
        table["status"] = [row.status.value for row in rows]
        for name, column in columns:
            table[name] = column
        return table

    def _config_columns(
        self, configs: Sequence[Mapping[str, Scalar]]
    ) -> Iterable[tuple[str, npt.NDArray[Any]]]:
        fixed = {"error", "config", *(name for name, _ in TRIAL_COLUMNS)}
        for name in self._hyper_parameters:
            column = name
            while column in fixed or (column != name and column in self._hyper_parameters):
                column = f"config_{column}"
            present = [name in config for config in configs]
            yield column, _column([config[name] for config in configs if name in config], present)

    def _rank_table(self) -> Table:
        nodes = _text(self._nodes)
        table: Table = np.zeros(
            len(nodes),
            dtype=[("rank", "i8"), ("node", nodes.dtype)]
            + [(name, "f8") for name in RankSeconds._fields],
        )
        table["rank"] = np.arange(len(nodes))
        table["node"] = nodes
        for name, seconds in self.rank_seconds._asdict().items():
            table[name] = seconds
        return table

    def _ladder_table(self) -> Table:
        absent = {"best": math.nan, "t_closed": math.nan}
        assert LADDER.names is not None
        return np.array(
            [
                tuple(line.get(name, absent.get(name, 0)) for name in LADDER.names)
                for line in self._ladder
            ],
            dtype=LADDER,
        )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_CHARACTERS else line[: _ERROR_CHARACTERS - 3] + "..."


def _text(values: Sequence[str]) -> npt.NDArray[np.bytes_]:
    """UTF-8 in bytes of one length, at least one byte, as HDF5 wants."""
    encoded = [value.encode("utf-8", "backslashreplace") for value in values]
    return np.array(encoded, dtype=f"S{max([1, *map(len, encoded)])}")


def _column(values: Sequence[Scalar], present: Sequence[bool]) -> npt.NDArray[Any]:
    """One hyper-parameter: numbers (absent: NaN) or text (absent: empty).

    Numbers are integers if all are and none is absent; text is JSON if the types are mixed.
    """
    kinds = {type(value) for value in values}
    where = np.array(present, dtype=bool)
    if kinds <= {int, float} or kinds == {bool}:
        if values and where.all() and float not in kinds:
            fits = all(-(2**63) <= int(value) < 2**63 for value in values)  # type: ignore[arg-type]
            return np.array(values, dtype="i8" if fits else "f8")
        numbers = np.full(len(where), math.nan)
        numbers[where] = np.array(values, dtype="f8")
        return numbers
    texts = iter([str(v) for v in values] if kinds == {str} else [to_json(v) for v in values])
    return _text([next(texts) if here else "" for here in present])
