"""What the package has come to cost: an earlier revision and this tree, side by side.

    python benchmarks/bench_overhead.py --before REV [--openmpi-python PATH] [--most 1.10]

Runs the jobs of `bench_dispatch.py`, and of `bench_resplit.py` without the restarts, with the
package of both in turn, and compares their central figures. The benchmarks are those of this tree,
so they may use only what both packages have. Ends with status 1 if a figure has become more than
``--most`` times as large.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bench_dispatch
import bench_resplit
import launcher
import machine

PACKAGE = "mpihpo"
WARM_UP_TRIALS = 20

Measure = Callable[[Path], tuple[dict[str, float], str]]
"""One job with the package in a folder: its central figures in seconds; the package it had."""


# What is compared.


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A figure's seconds before and after, as pairs of measurements next to each other in time."""

    title: str
    before: Sequence[float]
    after: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """After over before, of each pair."""
        return [after / before for before, after in zip(self.before, self.after, strict=True)]

    @property
    def ratio(self) -> float:
        """The ratio that counts: a disturbance that hits a few pairs does not move their median."""
        return statistics.median(self.ratios)

    def is_within(self, most: float) -> bool:
        """Whether the figure is at most ``most`` times what it was."""
        return self.ratio <= most


def orders(pairs: int) -> Iterator[tuple[bool, bool]]:
    """For each pair whether its first and its second measurement are of the earlier revision.

    Before, after, after, before, ...: what goes up or down steadily favours neither.
    """
    for pair in range(pairs):
        yield (True, False) if pair % 2 == 0 else (False, True)


def table(comparisons: Sequence[Comparison], most: float) -> list[str]:
    """One line for each figure; medians in ms, the ratio, its range over the pairs, the verdict."""
    wide = max(len(each.title) for each in comparisons)
    lines = [f"{'medians in ms':{wide}} {'before':>9} {'after':>9} {'ratio':>7}   of the pairs"]
    for each in comparisons:
        before, after = (1e3 * statistics.median(values) for values in (each.before, each.after))
        spread = f"{min(each.ratios):.3f} to {max(each.ratios):.3f}"
        verdict = "" if each.is_within(most) else f"  ABOVE {most:.2f}"
        lines.append(
            f"{each.title:{wide}} {before:9.3f} {after:9.3f} {each.ratio:7.3f}   {spread}{verdict}"
        )
    return lines


# The two trees.


def git(*arguments: str) -> bytes:
    """What git prints about this tree.

    Raises:
        SystemExit: It fails, most often for want of the earlier revision; says what git said.
    """
    command = ["git", "-C", str(launcher.ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode().strip()
        raise SystemExit(f"--before needs a revision of the clone {launcher.ROOT}: {said}")
    return done.stdout


def check_out(revision: str, folder: Path) -> None:
    """Put the package of a revision into ``folder``; the clone stays as it is."""
    packed = git("archive", "--format=zip", revision, PACKAGE)
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        archive.extractall(folder)


def name(revision: str) -> str:
    """A revision's short hash and its subject."""
    return git("log", "-1", "--format=%h %s", revision, "--").decode().strip()


# The measurements.


def dispatch(python: str, options: argparse.Namespace, title: str, with_output: bool) -> Measure:
    """Measures seconds per evaluation.

    Start and end of `mpihpo.run` are a good part of a short job, and would hide what each
    evaluation costs more; without them what they cost would not be seen: both are figures.
    """

    def measure(root: Path) -> tuple[dict[str, float], str]:
        figures, _ = bench_dispatch.launch_job(
            python, options.ranks, options.trials, with_output=with_output, root=root
        )
        wholes = {"run()": figures["seconds"], "training": figures["training_seconds"]}
        seconds = {f"{title}, {span}": whole / options.trials for span, whole in wholes.items()}
        return seconds, figures["package"]

    return measure


def resplit(options: argparse.Namespace) -> Measure:
    """Measures the median seconds of a re-split."""
    title = f"re-split, {options.resplit_ranks} ranks, gloo, {options.state} of state"

    def measure(root: Path) -> tuple[dict[str, float], str]:
        found = bench_resplit.launch_job(
            sys.executable,
            options.resplit_ranks,
            options.resplits,
            state=options.state,
            root=root,
        )
        return {title: found["median"]}, found["package"]

    return measure


def warm_up(python: str, options: argparse.Namespace, root: Path) -> str:
    """Have the package compiled and the libraries in the file cache; returns the MPI's name."""
    trials = min(WARM_UP_TRIALS, options.trials)
    figures, _ = bench_dispatch.launch_job(
        python, options.ranks, trials, with_output=True, root=root
    )
    return str(figures["mpi"])


def run_pair(
    measure: Measure, before: Path, after: Path, order: tuple[bool, bool]
) -> dict[str, tuple[float, float]]:
    """Of each figure the seconds before and after, measured in the given order.

    Raises:
        SystemExit: The ranks had another package than the one meant.
    """
    seconds = {}
    for is_before in order:
        root = before if is_before else after
        seconds[is_before], used = measure(root)
        if Path(used) != (root / PACKAGE).resolve():
            raise SystemExit(f"the ranks imported {used} instead of {root / PACKAGE}")
    return {title: (seconds[True][title], seconds[False][title]) for title in seconds[True]}


def compare(options: argparse.Namespace, before: Path) -> list[Comparison]:
    """All figures, each of both trees in turn; prints each pair when it is measured."""
    after = launcher.ROOT
    measures: list[Measure] = []
    for python in filter(None, (sys.executable, options.openmpi_python)):
        mpi = [warm_up(python, options, root) for root in (before, after)][-1]
        for output, with_output in (("no output", False), ("journal, results.h5", True)):
            title = f"evaluation, {options.ranks} ranks, {mpi}, {output}"
            measures.append(dispatch(python, options, title, with_output))
    if options.resplits:
        measures.append(resplit(options))
    seconds: dict[str, list[tuple[float, float]]] = {}
    for pair, order in enumerate(orders(options.pairs), start=1):
        for measure in measures:
            for title, (b, a) in run_pair(measure, before, after, order).items():
                seconds.setdefault(title, []).append((b, a))
                print(f"  pair {pair}: {1e3 * b:8.3f} -> {1e3 * a:8.3f} ms  {title}", flush=True)
    return [
        Comparison(title=title, before=[b for b, _ in pairs], after=[a for _, a in pairs])
        for title, pairs in seconds.items()
    ]


def main() -> None:
    """Measure both trees and print; status 1 if a figure has grown too much."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", required=True, metavar="REV", help="the earlier revision")
    parser.add_argument("--most", type=float, default=1.10, help="times as large; default 1.10")
    parser.add_argument("--pairs", type=int, default=4, help="of each figure; default 4")
    parser.add_argument("--trials", type=int, default=5000, help="evaluations in each job")
    parser.add_argument("--ranks", type=int, default=4, help="that the evaluations are lent")
    parser.add_argument("--resplits", type=int, default=30, help="0: without this part")
    parser.add_argument("--resplit-ranks", type=int, default=8)
    parser.add_argument("--state", default="10MB", help="model and optimizer, default 10MB")
    bench_dispatch.add_openmpi_python(parser)
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs} is not possible; expected 1 or more")
    before, after = name(options.before), name("HEAD")
    if git("status", "--porcelain", "--", PACKAGE):
        after += " (and what is not committed)"
    print(machine.header("What the package has come to cost"))
    print(f"before    {before}\nafter     {after}")
    print(
        f"pairs of each figure: {options.pairs}, in turn before after, after before; "
        f"{options.trials} evaluations, {options.resplits} re-splits in each job",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        check_out(options.before, Path(folder))
        comparisons = compare(options, Path(folder))
    print("\n".join(table(comparisons, options.most)))
    raise SystemExit(0 if all(each.is_within(options.most) for each in comparisons) else 1)


if __name__ == "__main__":
    main()
