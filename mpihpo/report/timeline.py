"""Draws who trained what: ranks over time, one block per evaluation, one colour per trial.

python -m mpihpo.report.timeline DIR OUT.svg
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpihpo.errors import MpihpoError, ResultsError
from mpihpo.results.encoding import runs_of
from mpihpo.results.summary import counted, format_seconds, format_value

if TYPE_CHECKING:
    from mpihpo.results.reader import Results

# Okabe and Ito's colours, which colour-blind people can tell apart; grey is kept for idle ranks.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_IDLE = "#EDEDED"
_INK = "#222222"
_WIDTH_INCHES, _DPI = 11.0, 150
_FONT_POINTS = 9.0
_VECTORS_UP_TO = 6_000


def draw_timeline(results: Results, path: str | os.PathLike[str]) -> None:
    """Draw the rank timeline as PNG, SVG or PDF, as the path's suffix says.

    Raises:
        ResultsError: matplotlib is missing, the suffix is unknown, or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ResultsError("the timeline needs matplotlib: pip install 'mpihpo[report]'") from None
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ResultsError(f"{target}: the name must end in .png, .svg or .pdf")
    world_size = len(results.ranks)
    height = min(7.5, 2.6 + 0.45 * min(world_size, 10))
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout=None)
    width = 0.855 if len(set(results.ranks["node"].tolist())) > 1 else 0.915
    axes = figure.add_axes((0.06, 1.0 / height, width, 1 - 2.0 / height), facecolor=_IDLE)
    _Drawing(results, figure, axes).draw()
    try:
        with rc_context({"svg.hashsalt": "mpihpo"}):
            figure.savefig(target, facecolor="white", metadata=_metadata(target))
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written: {error.strerror}") from error


def _metadata(target: Path) -> dict[str, Any]:
    """No date (nor random names, above), so that the same results make the same file."""
    return {"Date": None} if target.suffix.lower() == ".svg" else {}


class _Drawing:
    """One picture in the making; lengths on the page are in points."""

    def __init__(self, results: Results, figure: Any, axes: Any) -> None:
        self._results = results
        self._figure = figure
        self._axes = axes
        self._evaluations = results.evaluations
        self._best = results.best
        self._world_size = max(1, len(results.ranks))
        self._unit, self._unit_seconds = _time_unit(results.wall_seconds)
        self._duration = max(results.wall_seconds, 1e-9)
        box = axes.get_position()
        width, height = figure.get_size_inches()
        self._points_per_second = box.width * width * 72 / self._duration
        self._points_per_rank = box.height * height * 72 / self._world_size
        self._colours = self._trial_colours()

    def draw(self) -> None:
        self._frame()
        self._blocks()
        self._rungs()
        self._titles()
        self._legend()

    def _trial_colours(self) -> dict[int, str]:
        """Full colours for the trials that came furthest, the paler the earlier a trial ended."""
        rows = self._results.trials
        sign = 1 if self._results.objective.mode == "min" else -1
        order = sorted(rows, key=lambda row: (-row["epochs"], sign * row["last"], int(row["id"])))
        if self._best is not None:
            best = self._best.trial
            order.sort(key=lambda row: row["id"] != best)
        deepest = max((int(row["rung"]) for row in rows), default=0)
        colours = {}
        for place, row in enumerate(order):
            depth = (int(row["rung"]) + 1) / (deepest + 1)
            colours[int(row["id"])] = _tint(_COLOURS[place % len(_COLOURS)], 0.22 + 0.68 * depth)
        return colours

    def _frame(self) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = self._axes
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=3, color="#888888", labelsize=_FONT_POINTS, labelcolor=_INK)
        ticks = MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10]).tick_values(
            0, self._duration / self._unit_seconds
        )
        axes.set_xticks([at * self._unit_seconds for at in ticks])
        axes.xaxis.set_major_formatter(lambda at, _: f"{at / self._unit_seconds:g}")
        axes.set_xlabel(f"{self._unit} since the job's start", fontsize=_FONT_POINTS, color=_INK)
        axes.set_ylabel("world rank", fontsize=_FONT_POINTS, color=_INK)
        if self._world_size <= 16:
            axes.set_yticks(range(self._world_size))
        else:
            axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.set_xlim(0, self._duration)
        axes.set_ylim(self._world_size - 0.5, -0.5)
        self._nodes()

    def _nodes(self) -> None:
        """Borders between nodes, and their names beside them, where there is room."""
        names = self._results.ranks["node"].tolist()
        firsts = [rank for rank in range(len(names)) if names[rank] != names[rank - 1]]
        if len(firsts) < 2:
            return
        for first, end in zip(firsts, [*firsts[1:], len(names)], strict=True):
            if (end - first) * self._points_per_rank < 2 * _FONT_POINTS:
                continue
            if first:
                self._axes.axhline(first - 0.5, color=_INK, linewidth=1.0, zorder=1.5)
            name = names[first].partition(".")[0]
            self._axes.annotate(
                name if len(name) <= 14 else f"{name[:13]}\N{HORIZONTAL ELLIPSIS}",
                (1, (first + end) / 2 - 0.5),
                xycoords=("axes fraction", "data"),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=_FONT_POINTS - 1.5,
                color=_INK,
            )

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Each evaluation's runs of neighbouring ranks, highest number last: (row, first, ranks).

        The table has the ranks in the order of the group; on paper, 3 and 2 are neighbours.
        """
        members: dict[int, list[int]] = {}
        for row, first, ranks in self._results.evaluation_ranks.tolist():
            members.setdefault(row, []).extend(range(first, first + ranks))
        for row, ranks in members.items():
            yield from ((row, first, count) for first, count in runs_of(sorted(ranks)))

    def _blocks(self) -> None:
        from matplotlib.collections import PolyCollection

        gap = min(0.06, 0.6 / max(self._points_per_rank, 1e-9) / 2)
        ended: list[Any] = []
        colours: list[str] = []
        failed: list[Any] = []
        moving: list[Any] = []
        best: list[Any] = []
        outlines: list[float] = []
        widest: dict[int, tuple[int, int]] = {}
        for index, first, count in self._runs():
            row = self._evaluations[index]
            low, high = first - 0.5 + gap, first + count - 0.5 - gap
            start, stop = float(row["t_start"]), float(row["t_stop"])
            block = _box(start, stop, low, high)
            ended.append(block)
            colours.append(self._colours[int(row["trial"])])
            if row["ending"] == "failed":
                failed.append(block)
            before = min(float(row["resplit"] + row["restore"]), stop - start)
            after = min(float(row["save"]), stop - start - before)
            moving.extend(
                _box(left, right, low, high)
                for left, right in ((start, start + before), (stop - after, stop))
                if right > left
            )
            if self._best is not None and row["trial"] == self._best.trial:
                best.append(block)
                outlines.append(min(1.8, 0.3 + 0.12 * count * self._points_per_rank))
            if count > widest.get(index, (0, 0))[1]:
                widest[index] = (first, count)
        flat = len(ended) > _VECTORS_UP_TO
        edge = 0.5 if self._points_per_rank > 3 and len(ended) < 2_000 else 0.0
        add = self._axes.add_collection
        add(
            PolyCollection(
                ended,
                facecolors=colours,
                edgecolors="white",
                linewidths=edge,
                zorder=2,
                rasterized=flat,
            )
        )
        add(
            PolyCollection(
                moving, facecolors=_INK, alpha=0.55, linewidths=0, zorder=2.2, rasterized=flat
            )
        )
        add(
            PolyCollection(
                failed, facecolors="none", edgecolors=_INK, hatch="xxxx", linewidths=0.5, zorder=2.4
            )
        )
        add(
            PolyCollection(
                best, facecolors="none", edgecolors="black", linewidths=outlines, zorder=4
            )
        )
        self._labels(widest)

    def _labels(self, widest: dict[int, tuple[int, int]]) -> None:
        for index, (first, count) in widest.items():
            row = self._evaluations[index]
            before = float(row["resplit"] + row["restore"])
            start, stop = float(row["t_start"]) + before, float(row["t_stop"]) - float(row["save"])
            text = _fitting(
                _label_choices(int(row["trial"]), int(row["rung"])),
                (stop - start) * self._points_per_second - 3,
                count * self._points_per_rank - 2,
            )
            if text:
                has_failed = row["ending"] == "failed"
                is_best = self._best is not None and row["trial"] == self._best.trial
                self._axes.text(
                    (start + stop) / 2,
                    first + count / 2 - 0.5,
                    text,
                    ha="center",
                    va="center",
                    fontsize=_FONT_POINTS - 1,
                    linespacing=1.1,
                    fontweight="bold" if is_best else "normal",
                    color=_INK if has_failed else _readable_on(self._colours[int(row["trial"])]),
                    bbox={"facecolor": "white", "linewidth": 0, "pad": 1} if has_failed else None,
                    zorder=5,
                )

    def _rungs(self) -> None:
        """Closings as dashed lines, named above the blocks where the names do not collide."""
        end_of_last = 0.0
        for row in self._results.ladder:
            closed = float(row["t_closed"])
            if closed != closed:
                continue
            self._axes.axvline(closed, color="black", linewidth=1.0, dashes=(4, 2), zorder=4.5)
            trained, promoted = int(row["evaluated"]), int(row["promoted"])
            count = f"{trained} \N{RIGHTWARDS ARROW} {promoted}" if promoted else f"{trained} done"
            right = closed * self._points_per_second
            text = _fitting((f"rung {row['rung']}: {count}", count), right - end_of_last - 6, 99)
            if text:
                self._axes.annotate(
                    text,
                    (closed, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="right",
                    fontsize=_FONT_POINTS - 1,
                    color=_INK,
                )
                end_of_last = right

    def _titles(self) -> None:
        results = self._results
        box = self._axes.get_position()
        height = self._figure.get_size_inches()[1]
        self._figure.text(
            box.x0,
            1 - 0.34 / height,
            "Which rank trained which trial",
            fontsize=13,
            fontweight="bold",
            color=_INK,
        )
        line = (
            f"{counted(len(results.trials), 'trial')}, "
            f"{counted(len(self._evaluations), 'evaluation')} on "
            f"{counted(self._world_size, 'rank')} in {format_seconds(results.wall_seconds)}; "
            f"{100 * results.utilisation:.0f} % of the rank time is training"
        )
        if self._best is not None:
            line += (
                f"; best: trial {self._best.trial}, {results.objective.metric} "
                f"{format_value(self._best.objective)} after {counted(self._best.epochs, 'epoch')}"
            )
        self._figure.text(box.x0, 1 - 0.60 / height, line, fontsize=_FONT_POINTS + 0.5, color=_INK)

    def _legend(self) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        height = self._figure.get_size_inches()[1]
        entries: list[tuple[Any, str]] = [
            (Patch(facecolor=_tint(_COLOURS[1], 0.9)), "reached a high rung"),
            (Patch(facecolor=_tint(_COLOURS[1], 0.35)), "stopped early"),
            (Patch(facecolor=_tint(_INK, 0.6)), "re-split, state handed over"),
            (Patch(facecolor=_IDLE, edgecolor="#999999", linewidth=0.5), "idle"),
        ]
        if self._best is not None:
            colour = self._colours[self._best.trial]
            patch = Patch(facecolor=colour, edgecolor="black", linewidth=1.6)
            entries.insert(0, (patch, f"best trial ({self._best.trial})"))
        if "failed" in self._evaluations["ending"].tolist():
            entries.append((Patch(facecolor="white", edgecolor=_INK, hatch="xxxx"), "failed"))
        if len(self._results.ladder):
            line = Line2D([], [], color="black", linewidth=1.0, dashes=(4, 2))
            entries.append((line, "rung closed: trained \N{RIGHTWARDS ARROW} promoted"))
        box = self._axes.get_position()
        self._figure.legend(
            [handle for handle, _ in entries],
            [name for _, name in entries],
            loc="lower left",
            bbox_to_anchor=(box.x0 - 0.008, 0.06 / height),
            ncols=len(entries),
            frameon=False,
            fontsize=_FONT_POINTS - 1,
            labelcolor=_INK,
            handlelength=1.6,
            columnspacing=1.2,
            handletextpad=0.5,
        )


def _box(left: float, right: float, low: float, high: float) -> list[tuple[float, float]]:
    return [(left, low), (right, low), (right, high), (left, high)]


def _time_unit(seconds: float) -> tuple[str, float]:
    """The unit for an axis of this length, and its seconds."""
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 4 * 3600 else ("hours", 3600.0)


def _label_choices(trial: int, rung: int) -> Sequence[str]:
    """Texts for a block, the most telling first."""
    return (
        f"trial {trial}\nrung {rung}",
        f"trial {trial} \N{MIDDLE DOT} rung {rung}",
        f"{trial}\nr{rung}",
        f"{trial} \N{MIDDLE DOT} r{rung}",
        f"{trial}",
    )


def _fitting(choices: Sequence[str], width: float, height: float) -> str:
    """The first text that fits into a block of this size in points; empty if none does."""
    size = _FONT_POINTS - 1
    for text in choices:
        lines = text.split("\n")
        if max(map(_text_width, lines)) <= width and len(lines) * size * 1.2 <= height:
            return text
    return ""


def _text_width(text: str) -> float:
    return 0.62 * (_FONT_POINTS - 1) * len(text)


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _tint(colour: str, strength: float) -> str:
    """The colour mixed with white: 1 leaves it, 0 is white."""
    mixed = (round(255 * (1 - strength * (1 - part))) for part in _rgb(colour))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _readable_on(colour: str) -> str:
    red, green, blue = _rgb(colour)
    return _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def main(arguments: Sequence[str]) -> int:
    """``python -m mpihpo.report.timeline DIR OUT.svg``."""
    from mpihpo.results.reader import Results

    if len(arguments) != 2:
        sys.stderr.write("usage: python -m mpihpo.report.timeline DIR OUT.svg\n")
        return 2
    try:
        draw_timeline(Results(arguments[0]), arguments[1])
    except MpihpoError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
