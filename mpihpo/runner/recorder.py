"""Writes down what happens: journal, tables, progress. One rank has one.

The journal says that an evaluation finished only when its state is on the disk too, so that a later
job can go on from every outcome it finds. Entries wait for that in their order. They also wait
while the disk is full or away: the work goes on in memory and is written when it can be.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpihpo.errors import ExperimentError, ResultsError
from mpihpo.experiment import Experiment
from mpihpo.records import Allocation, Outcome, Report, RungPlan, RungResult, Status
from mpihpo.report.progress import Progress
from mpihpo.results.entries import (
    Provenance,
    decode_rung,
    encode_experiment,
    encode_outcome,
    encode_rung,
    encode_start,
    encode_trial,
)
from mpihpo.results.file import write_results
from mpihpo.results.journal import Journal, read_journal
from mpihpo.results.tables import ResultTables
from mpihpo.runner.lock import RunLock
from mpihpo.runner.resume import EarlierRun
from mpihpo.runner.saved_state import remove_partial, saved_states, state_path

RESULTS = "results.h5"
JOURNAL = "journal.jsonl"
EXPERIMENT = "experiment.yaml"
CHECKPOINTS = "checkpoints"

_RETRY_SECONDS = 5.0


_DROP = "drop"


@dataclass(slots=True)
class _Entry:
    """One journal entry that is not written yet, or a deletion that waits for those before it."""

    kind: str
    fields: dict[str, Any]
    waits_for: tuple[int, int] | None = None
    """Trial and epoch whose state is still being saved."""


class Recorder:
    """Keeps the record of one job.

    Args:
        experiment: The effective experiment.
        provenance: What the job was started with.
        train_digest: Tells whether the training function's file changed; None: it has none.
        planned: The planned ladder.
        directory: The run's folder; None: nothing is written.
        progress: What a person sees; None: nothing.
        earlier: What earlier jobs did in this folder; None: this is the first.
        takes_over: The folder is locked for a rank of this job that has died.
    """

    def __init__(
        self,
        experiment: Experiment,
        provenance: Provenance,
        train_digest: str | None,
        planned: tuple[RungPlan, ...],
        directory: Path | None,
        progress: Progress | None,
        earlier: EarlierRun | None = None,
        *,
        takes_over: bool = False,
    ) -> None:
        self._directory = directory
        self._progress = progress
        self._journal: Journal | None = None
        self._lock: RunLock | None = None
        self._provenance = provenance
        self._train_digest = train_digest
        self._earlier = earlier
        self._takes_over = takes_over
        self._queue: deque[_Entry] = deque()
        self._problems: dict[str, str] = {}  # by file
        self._told: set[str] = set()
        self._next_try = 0.0
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
        self._on_disk: defaultdict[int, set[int]] = defaultdict(set)  # epochs saved, by trial
        self._rungs: dict[int, RungResult] = {}  # closed ones that the journal has

    @contextmanager
    def open(self) -> Iterator[Recorder]:
        """While it lasts the folder is locked and the journal open.

        Raises:
            ExperimentError: Another job holds the folder.
            OSError: The folder cannot be written.
        """
        with ExitStack() as stack:
            if self._progress is not None:
                stack.callback(self._progress.close)
            if self._directory is not None:
                self._lock = stack.enter_context(
                    RunLock(self._directory, takes_over=self._takes_over)
                )
                after = None if self._earlier is None else self._earlier.journal
                if after is not None and read_journal(self._directory / JOURNAL).end != after.end:
                    problem = f"{self._directory} was written to by another job until just now"
                    raise ExperimentError("output", f"{problem}; start this one again")
                journal = Journal(self._directory / JOURNAL, after)
                self._journal = stack.enter_context(journal)
                (self._directory / EXPERIMENT).write_text(self._provenance.experiment_text)
            is_first = self._earlier is None or not self._earlier.journal.entries
            kind = "experiment" if is_first else "resume"
            fields = encode_experiment(self._provenance)
            self._append(kind, train_digest=self._train_digest, **fields)
            if self._earlier is not None:
                self._take_over(self._earlier)
            yield self

    def _take_over(self, earlier: EarlierRun) -> None:
        """Put what earlier jobs did into the tables."""
        for trial in earlier.history.trials.values():
            self._known.add(trial.id)
            self.tables.add_trial(trial)
        outcomes = [step for step in earlier.history.steps if isinstance(step, Outcome)]
        for outcome in outcomes:
            self.tables.add(outcome)
        assert self._directory is not None
        remove_partial(self._directory / CHECKPOINTS)
        for trial_id, epoch in saved_states(self._directory / CHECKPOINTS):
            self._on_disk[trial_id].add(epoch)
        for entry in earlier.journal.entries:
            if entry["kind"] == "rung":
                self._rungs[entry["rung"]] = decode_rung(entry)
        if self._takes_over:
            left = f"{self._provenance.world_size} ranks are left, counted anew"
            self.note("lost", f"rank 0 died, and another one coordinates; {left}")
        if earlier.journal.problem is not None:
            self.note("loss", f"journal: {earlier.journal.problem}")
        self.note("notice", f"resuming after {len(outcomes)} outcomes and {earlier.seconds:.1f} s")

    # Entries.

    def _append(self, kind: str, **fields: Any) -> None:
        if self._journal is not None:
            self._queue.append(_Entry(kind, fields))
            self._write_entries()

    def _write_entries(self) -> None:
        """Write what may be written, in order."""
        if self._journal is None or JOURNAL in self._problems:
            return
        try:
            while self._queue and self._queue[0].waits_for is None:
                entry = self._queue[0]
                if entry.kind == _DROP:
                    self._delete(**entry.fields)
                else:
                    self._journal.append(entry.kind, **entry.fields)
                self._queue.popleft()
        except ResultsError as error:
            self._trouble(JOURNAL, str(error))

    def _trouble(self, file: str, problem: str) -> None:
        self._problems[file] = problem
        if problem not in self._told and self._progress is not None:
            self._told.add(problem)
            self._progress.note(f"{problem}; the work goes on in memory until it can be written")

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

    def ended(self, outcome: Outcome, now: float, *, saving: int | None) -> None:
        """An evaluation is over.

        Args:
            outcome: Its outcome.
            now: Seconds since the job's start.
            saving: The epoch whose state is being saved; None: there is no state to save.
        """
        fields = encode_outcome(outcome)
        fields["state"] = "none" if saving is None else "disk"
        if self._journal is not None:
            trial_id = outcome.allocation.evaluation.trial.id
            waits_for = None if saving is None else (trial_id, saving)
            self._queue.append(_Entry("outcome", fields, waits_for))
            self._write_entries()
        self.tables.add(outcome)
        if self._progress is not None:
            self._progress.finished(outcome, now)

    def saved(self, trial_id: int, epoch: int, problem: str | None) -> None:
        """A trial's state is on the disk, or cannot be."""
        if problem is None:
            self._on_disk[trial_id].add(epoch)
        for entry in self._queue:
            if entry.waits_for == (trial_id, epoch):
                entry.waits_for = None
                if problem is not None:
                    entry.fields["state"] = "lost"
        if problem is not None:
            lost = f"trial {trial_id}: its state after epoch {epoch} is not on the disk"
            self.note("loss", f"{lost}: {problem}")
        self._write_entries()

    def drop(self, trial_id: int, *, before: int | None = None) -> None:
        """Delete a trial's saved states after what is queued: all, or those older than an epoch's.

        Newer ones are kept: of an evaluation whose outcome is known, while an earlier one had to be
        done again.
        """
        if self._journal is not None:
            self._queue.append(_Entry(_DROP, {"trial_id": trial_id, "before": before}))
            self._write_entries()

    def evict(self, trial_id: int) -> None:
        """Delete a trial's saved states now: room is short, and the trial can do without.

        A job that is killed just then may leave a journal that counts on them; the next one then
        trains the trial again.
        """
        if self._directory is not None:
            self._delete(trial_id, before=None)

    def _delete(self, trial_id: int, before: int | None) -> None:
        assert self._directory is not None
        epochs = self._on_disk[trial_id]
        if before is not None and before not in epochs:
            return  # an older state is better than none
        for epoch in [each for each in epochs if before is None or each < before]:
            epochs.remove(epoch)
            with suppress(OSError):  # it takes room, and does no other harm
                state_path(self._directory / CHECKPOINTS, trial_id, epoch).unlink()

    def rung_closed(self, result: RungResult, now: float) -> None:
        """A rung is over: the results file is written anew."""
        self.tables.add_rung(result)
        if self._rungs.get(result.rung) == result:  # closed by an earlier job
            return
        self._append("rung", **encode_rung(result))
        if self._progress is not None:
            self._progress.rung_closed(result, now)
        self._write_results()

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
        if self._lock is not None:
            self._lock.touch()
        if self._problems and now >= self._next_try:
            self._next_try = now + _RETRY_SECONDS
            self._try_again()

    def _try_again(self) -> None:
        self._problems.clear()
        self._write_entries()
        self._write_results()

    def _write_results(self) -> None:
        if self._directory is None:
            return
        try:
            write_results(self._directory / RESULTS, self.tables)
        except ResultsError as error:
            self._trouble(RESULTS, str(error))

    def finish(self, reason: str, now: float) -> str | None:
        """The job is over; returns what could not be written, or None if all was."""
        self.tables.finish(reason, now)
        for entry in self._queue:
            entry.waits_for = None
        self._append("finish", reason=reason, seconds=now)
        self._try_again()
        if self._journal is not None and JOURNAL not in self._problems:
            try:
                self._journal.sync()
            except ResultsError as error:
                self._trouble(JOURNAL, str(error))
        return "; ".join(self._problems.values()) or None
