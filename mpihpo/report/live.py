"""The live view of a job on a terminal, drawn with rich."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpihpo.records import RungPlan, epochs_text
from mpihpo.results.encoding import format_ranks
from mpihpo.results.summary import format_seconds, format_value

if TYPE_CHECKING:
    from mpihpo.report.progress import JobState

DRAWINGS_PER_SECOND = 5
_FIXED_LINES = 6


class LiveView:
    """A compact picture of the job, redrawn in place at the bottom of the terminal.

    Args:
        stream: Where to draw.
        state: What to draw.
        size: Columns and lines of the terminal; None: as the stream or the environment says.
    """

    def __init__(
        self, stream: TextIO, state: JobState, size: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        self._state = state
        self._size = size
        self._drawn = float("-inf")
        self._now = 0.0
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()

    def draw(self, now: float) -> None:
        """Redraw unless that was done less than a fifth of a second ago."""
        self._now = now
        if 0 <= now - self._drawn < 1 / DRAWINGS_PER_SECOND:
            return
        self._drawn = now
        self._live.update(self.picture(), refresh=True)

    def print(self, line: str) -> None:
        """Write a line above the view."""
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Draw a last time and give the terminal back."""
        self._live.update(self.picture(), refresh=True)
        self._live.stop()

    def picture(self) -> RenderableType:
        """What to draw now, no larger than the terminal."""
        if self._size is not None:
            self._console.size = self._size()
        width, height = self._console.size
        rungs = self._rungs(width)
        room = max(1, height - _FIXED_LINES - len(self._state.plan))
        return Group(rungs, self._busy(width), self._running(room), self._best())

    def _rungs(self, width: int) -> RenderableType:
        state = self._state
        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(no_wrap=True)
        for plan in state.plan:
            done = state.evaluated.get(plan.rung, 0)
            style = "dim" if plan.rung in state.closed else "bold" if self._is_open(plan) else ""
            title = f"rung {plan.rung}  epochs {epochs_text(plan.start, plan.stop)}"
            table.add_row(
                Text(title, style=style),
                _bar(done, plan.trials, width),
                Text(f"{done}/{plan.trials} trials", style=style),
            )
        return table

    def _is_open(self, plan: RungPlan) -> bool:
        return any(a.evaluation.rung == plan.rung for a in self._state.running.values())

    def _busy(self, width: int) -> RenderableType:
        state = self._state
        table = Table.grid(padding=(0, 2))
        failed = f"  {state.failed} failed" if state.failed else ""
        table.add_row(
            Text("busy ranks"),
            _bar(state.busy, state.world_size, width),
            Text(f"{state.busy}/{state.world_size}  {format_seconds(self._now)}{failed}"),
        )
        return table

    def _running(self, room: int) -> RenderableType:
        state = self._state
        metric = state.objective.metric
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("trial", "rung", "epoch", metric):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("ranks", no_wrap=True, overflow="ellipsis")
        running = sorted(
            state.running.values(), key=lambda a: (-a.evaluation.rung, a.evaluation.trial.id)
        )
        shown = running if len(running) <= room else running[: room - 1]
        for allocation in shown:
            evaluation = allocation.evaluation
            report = state.reports.get(evaluation.trial.id)
            value = report.metrics.get(metric) if report else None
            epoch = report.epoch if report else evaluation.start
            table.add_row(
                str(evaluation.trial.id),
                str(evaluation.rung),
                f"{epoch}/{evaluation.stop}",
                "-" if value is None else format_value(float(value)),
                format_ranks(allocation.ranks),
            )
        if len(shown) < len(running):
            table.add_row("...", "", "", "", f"and {len(running) - len(shown)} more trials")
        return table

    def _best(self) -> RenderableType:
        best = self._state.best
        if best is None:
            return Text("best: none yet", style="dim", no_wrap=True)
        evaluation = best.allocation.evaluation
        objective = "-" if best.objective is None else format_value(float(best.objective))
        config = "  ".join(f"{k}={format_value(v)}" for k, v in evaluation.trial.config.items())
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"best: trial {evaluation.trial.id}", style="bold green")
        metric = self._state.objective.metric
        text.append(f"  {metric}={objective} at epoch {evaluation.stop}")
        text.append(f"  {config}", style="dim")
        return text


def _bar(done: int, total: int, width: int) -> ProgressBar:
    return ProgressBar(
        total=max(1, total), completed=min(done, total), width=max(8, min(30, width // 3))
    )
