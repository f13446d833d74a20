"""Writes down what happens: journal, tables, progress. One rank has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpihpo.experiment import Experiment
from mpihpo.records import Allocation, Outcome, Report, RungPlan, RungResult, Status
from mpihpo.report.progress import Progress
from mpihpo.results.entries import (
    Provenance,
    encode_experiment,
    encode_outcome,
    encode_rung,
    encode_start,
    encode_trial,
)
from mpihpo.results.file import write_results
from mpihpo.results.journal import Journal
from mpihpo.results.tables import ResultTables

RESULTS = "results.h5"
JOURNAL = "journal.jsonl"
EXPERIMENT = "experiment.yaml"


class Recorder:
    """Keeps the record of one job.

    Args:
        experiment: The effective experiment.
        provenance: What the job was started with.
        planned: The planned ladder.
        directory: The run's folder; None: nothing is written.
        progress: What a person sees; None: nothing.
    """

    def __init__(
        self,
        experiment: Experiment,
        provenance: Provenance,
        planned: tuple[RungPlan, ...],
        directory: Path | None,
        progress: Progress | None,
    ) -> None:
        self._directory = directory
        self._progress = progress
        self._journal: Journal | None = None
        self._provenance = provenance
        self._experiment = experiment
        self.tables = ResultTables(
            experiment_text=provenance.experiment_text,
            seed=experiment.seed,
            objective=experiment.objective,
            hyper_parameters=tuple(experiment.search.space),
            nodes=provenance.nodes,
            versions=provenance.versions,
        )
        self.tables.add_ladder(planned)
        self._known: set[int] = set()

    @contextmanager
    def open(self) -> Iterator[Recorder]:
        """While it lasts the journal is open."""
        try:
            if self._directory is None:
                yield self
                return
            (self._directory / EXPERIMENT).write_text(self._provenance.experiment_text)
            with Journal(self._directory / JOURNAL) as self._journal:
                self._append("experiment", **encode_experiment(self._provenance))
                yield self
        finally:
            self._journal = None
            if self._progress is not None:
                self._progress.close()

    def _append(self, kind: str, **fields: object) -> None:
        if self._journal is not None:
            self._journal.append(kind, **fields)

    def started(self, allocation: Allocation, now: float) -> None:
        """An evaluation was given its ranks."""
        trial = allocation.evaluation.trial
        if trial.id not in self._known:
            self._known.add(trial.id)
            self._append("trial", **encode_trial(trial))
            self.tables.add_trial(trial)
        self._append("start", **encode_start(allocation))
        if self._progress is not None:
            self._progress.started(allocation, now)

    def reported(self, trial_id: int, report: Report, now: float) -> None:
        """A running trial has ended an epoch."""
        if self._progress is not None:
            self._progress.reported(trial_id, report, now)

    def ended(self, outcome: Outcome, now: float) -> None:
        """An evaluation is over."""
        self._append("outcome", **encode_outcome(outcome))
        self.tables.add(outcome)
        if self._progress is not None:
            self._progress.finished(outcome, now)

    def rung_closed(self, result: RungResult, now: float) -> None:
        """A rung is over: the results file is written anew."""
        self._append("rung", **encode_rung(result))
        self.tables.add_rung(result)
        if self._progress is not None:
            self._progress.rung_closed(result, now)
        self.write()

    def status(self, trial_id: int, status: Status) -> None:
        """A trial's status is known."""
        self.tables.set_status(trial_id, status)

    @property
    def trial_ids(self) -> frozenset[int]:
        """Trials that were started."""
        return frozenset(self._known)

    def note(self, kind: str, text: str) -> None:
        """One line of other news, in the journal and for the person watching."""
        self._append(kind, text=text)
        if self._progress is not None:
            self._progress.note(text)

    def tick(self, now: float) -> None:
        """Time goes on."""
        if self._progress is not None:
            self._progress.tick(now)

    def finish(self, reason: str, now: float) -> None:
        """The job is over."""
        self.tables.finish(reason, now)
        self._append("finish", reason=reason, seconds=now)
        if self._journal is not None:
            self._journal.sync()
        self.write()

    def write(self) -> None:
        """Replace the results file by the present tables."""
        if self._directory is not None:
            write_results(self._directory / RESULTS, self.tables)
