"""The end of a run on one screen of plain text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpihpo.records import epochs_text

if TYPE_CHECKING:
    from mpihpo.results.reader import Results


def summarise(results: Results) -> str:
    """The job in one line, its ladder as a table, the best trial with its configuration."""
    parts = [_job_line(results)]
    if len(results.ladder):
        parts.append(_ladder_table(results))
    parts.append(_best(results))
    return "\n\n".join(parts)


def format_value(value: Any) -> str:
    """A number in four significant digits, anything else as in JSON."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def format_seconds(seconds: float) -> str:
    """Seconds as people say them: ``12.3 s``, ``4:05 min``, ``2:10:00 h``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 rank``, ``4 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _job_line(results: Results) -> str:
    trials = results.trials
    statuses = trials["status"].tolist()
    counts = [f"{statuses.count(name)} {name}" for name in dict.fromkeys(sorted(statuses))]
    return (
        f"{counted(len(trials), 'trial')} ({', '.join(counts) or 'none'}) "
        f"on {counted(len(results.ranks), 'rank')} in "
        f"{format_seconds(results.wall_seconds)}, {100 * results.utilisation:.0f} % busy"
        + (f": {results.reason}" if results.reason else "")
    )


def _ladder_table(results: Results) -> str:
    head = ("rung", "epochs", "planned", "trained", "failed", "promoted")
    lines: list[Sequence[str]] = [(*head, f"best {results.objective.metric}", "closed at")]
    for row in results.ladder:
        is_open = math.isnan(row["t_closed"])
        lines.append(
            (
                str(row["rung"]),
                epochs_text(int(row["start"]), int(row["stop"])),
                str(row["planned"]),
                *(("-",) * 3 if is_open else (str(row[name]) for name in _COUNTS)),
                "-" if math.isnan(row["best"]) else format_value(float(row["best"])),
                "-" if is_open else format_seconds(row["t_closed"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


_COUNTS = ("evaluated", "failed", "promoted")


def _best(results: Results) -> str:
    best = results.best
    if best is None:
        return "no trial finished an evaluation"
    title = (
        f"best: trial {best.trial}, {results.objective.metric} {format_value(best.objective)} "
        f"after {counted(best.epochs, 'epoch')}, on {counted(best.ranks, 'rank')}"
    )
    width = max(map(len, best.config), default=0)
    lines = [f"  {name:<{width}}  {format_value(value)}" for name, value in best.config.items()]
    if results.checkpoint:
        lines.append(f"checkpoint: {results.checkpoint}")
    return "\n".join([title, *lines])
