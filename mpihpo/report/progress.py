"""Progress of a running job on one stream: a live view on a terminal, plain lines elsewhere.

The live view needs rich (extra ``report``). Plain lines are ``key=value`` and few: a huge job
prints at most ``LINES_PER_SECOND`` outcomes a second and counts the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, TextIO

from mpihpo.records import (
    Allocation,
    Ending,
    Failure,
    Objective,
    Outcome,
    Report,
    RungPlan,
    RungResult,
    best_outcome,
    epochs_text,
)
from mpihpo.report.terminal import find_terminal
from mpihpo.results.encoding import format_ranks
from mpihpo.results.summary import format_value

if TYPE_CHECKING:
    from mpihpo.report.live import LiveView

LINES_PER_SECOND = 20
_TRACEBACKS = 20


class JobState:
    """What is going on: the running evaluations, each rung's counts, the best outcome so far."""

    def __init__(
        self, total_plan: Sequence[RungPlan], world_size: int, objective: Objective
    ) -> None:
        self.plan = tuple(total_plan)
        self.world_size = world_size
        self.objective = objective
        self.running: dict[int, Allocation] = {}
        self.reports: dict[int, Report] = {}
        self.evaluated: dict[int, int] = {}
        self.failed = 0
        self.best: Outcome | None = None
        self.closed: set[int] = set()

    @property
    def busy(self) -> int:
        """Number of ranks that are lent."""
        return sum(len(allocation.ranks) for allocation in self.running.values())

    def start(self, allocation: Allocation) -> None:
        """Ranks have been lent."""
        self.running[allocation.evaluation.trial.id] = allocation

    def finish(self, outcome: Outcome) -> None:
        """The ranks are back."""
        evaluation = outcome.allocation.evaluation
        self.running.pop(evaluation.trial.id, None)
        self.reports.pop(evaluation.trial.id, None)
        self.evaluated[evaluation.rung] = self.evaluated.get(evaluation.rung, 0) + 1
        if outcome.ending is Ending.FAILED:
            self.failed += 1
        elif self.best is None:
            self.best = best_outcome((outcome,), self.objective)
        else:
            self.best = best_outcome((self.best, outcome), self.objective)


class Progress:
    """Shows a job on a stream; a broken stream ends the show, never the job.

    Args:
        stream: Where to write.
        total_plan: The planned ladder; empty when there is none.
        world_size: Number of world ranks.
        objective: The metric that decides, and which way.
        interactive: Redraw in place; by default on a terminal. Without rich, plain lines.
    """

    def __init__(
        self,
        stream: TextIO,
        total_plan: Sequence[RungPlan],
        world_size: int,
        objective: Objective,
        interactive: bool | None = None,
    ) -> None:
        self._stream = stream
        self._is_open = True
        self._state = JobState(total_plan, world_size, objective)
        self._live: LiveView | None = None
        terminal = find_terminal(stream) if interactive is None else None
        if (interactive or terminal is not None) and find_spec("rich"):
            from mpihpo.report.live import LiveView

            self._live = LiveView(stream, self._state, None if terminal is None else terminal.size)
        self._second = -1
        self._lines = 0
        self._held_back = 0
        self._errors: set[tuple[str, str]] = set()

    def started(self, allocation: Allocation, now: float) -> None:
        """An evaluation has got its ranks; ``now`` is seconds since the job's start."""
        self._state.start(allocation)
        self.tick(now)

    def reported(self, trial_id: int, report: Report, now: float) -> None:
        """A running trial has ended an epoch."""
        self._state.reports[trial_id] = report
        self.tick(now)

    def finished(self, outcome: Outcome, now: float) -> None:
        """An evaluation has ended, well or badly."""
        self._state.finish(outcome)
        if outcome.failure is not None:
            self._failed(outcome, outcome.failure, now)
        elif self._live is None and self._may_print(now):
            self._print(self._outcome_line(outcome, now))
        self.tick(now)

    def rung_closed(self, result: RungResult, now: float) -> None:
        """All evaluations of a rung have ended."""
        self._state.closed.add(result.rung)
        self._print_held_back()
        best = "-" if result.best is None else format_value(float(result.best))
        self._print(
            f"{now:.1f}s rung={result.rung} epochs={epochs_text(result.start, result.stop)} "
            f"evaluated={result.evaluated} failed={result.failed} "
            f"promoted={len(result.promoted)} best={best}"
        )
        self.tick(now)

    def note(self, text: str) -> None:
        """Show one line of other news."""
        self._print(text)

    def tick(self, now: float) -> None:
        """Redraw the live view if it is time; call it while nothing else happens."""
        if self._live is not None and self._is_open:
            try:
                self._live.draw(now)
            except (OSError, ValueError):
                self._is_open = False

    def close(self) -> None:
        """Write what was held back and leave the terminal as it was."""
        self._print_held_back()
        if self._live is not None:
            try:
                self._live.close()
            except (OSError, ValueError):
                self._is_open = False

    def _failed(self, outcome: Outcome, failure: Failure, now: float) -> None:
        """The first traceback of each kind of error, one line of the others."""
        place = failure.traceback.rpartition('  File "')[2].partition("\n")[0]
        is_new = (failure.kind, place) not in self._errors and len(self._errors) < _TRACEBACKS
        if not is_new and not self._may_print(now):
            return
        message = failure.message.splitlines()[0] if failure.message else ""
        line = f"{self._outcome_line(outcome, now)} error={failure.kind}: {message}"
        if is_new:
            self._errors.add((failure.kind, place))
            line = "\n  ".join([line, *failure.traceback.rstrip().splitlines()])
        self._print(line)

    def _outcome_line(self, outcome: Outcome, now: float) -> str:
        allocation = outcome.allocation
        evaluation = allocation.evaluation
        if outcome.objective is None:
            result = outcome.ending.value
        else:
            metric = self._state.objective.metric
            result = f"{metric}={format_value(float(outcome.objective))}"
        return (
            f"{now:.1f}s trial={evaluation.trial.id} rung={evaluation.rung} "
            f"epochs={epochs_text(evaluation.start, evaluation.stop)} "
            f"ranks={format_ranks(allocation.ranks)} {result}"
        )

    def _may_print(self, now: float) -> bool:
        """Whether this second has room for one more outcome; it is counted if not."""
        second = int(now)
        if second != self._second:
            self._second = second
            self._lines = 0
            self._print_held_back()
        if self._lines == LINES_PER_SECOND:
            self._held_back += 1
            return False
        self._lines += 1
        return True

    def _print_held_back(self) -> None:
        if self._held_back:
            self._print(f"+ {self._held_back} more outcomes")
            self._held_back = 0

    def _print(self, line: str) -> None:
        if not self._is_open:
            return
        try:
            if self._live is not None:
                self._live.print(line)
            else:
                self._stream.write(line + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            self._is_open = False
