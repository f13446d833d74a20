"""A long job in which half of the trials suffer a fault, and a short one that is killed repeatedly.

    python benchmarks/soak.py --seconds 600 --ranks 4 --seed 1 --kills 20

Started without a launcher, with the Python of the MPI that is to be used. Ends with status 1 if the
job hangs, a trial is not accounted for, something grows, or the killed job comes to something else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import machine
import soak_job
from soak_plan import Account, draw, growth, problem_with, seconds_to_release, too_much

if TYPE_CHECKING:
    from mpihpo import Results

HERE = Path(__file__).resolve().parent
CLOSING_SECONDS = 60.0
"""The long job may take so much longer than its time until it counts as hanging."""
LONG_ENOUGH_SECONDS = 60.0
"""A shorter job need not say of each rank what has grown."""


def be_a_rank(options: argparse.Namespace) -> None:
    """Of the long job; rank 0 writes what there was to ``figures.json``."""
    folder = options.output
    results, kept = soak_job.run(options.seconds, options.seed, folder / "run")
    if kept is not None:
        figures = account(results, options.seed, options.seconds, kept)
        (folder / "figures.json").write_text(json.dumps(figures))


def account(
    results: Results, seed: int, seconds: float, kept: Sequence[soak_job.Kept]
) -> dict[str, Any]:
    """What there was, and what was wrong with it."""
    spared = {trial for each in kept for trial in each.spared}
    faults = {key: at for each in kept for key, at in each.faults.items()}
    problems = [] if results.reason == "time limit" else [f"the job ended by: {results.reason}"]
    unfinished = 0
    for row in results.trials:
        trial, status = int(row["id"]), str(row["status"])
        error = str(row["error"]).partition(":")[0]
        accounted = Account(trial, status, int(row["rung"]), error, trial in spared)
        problem = problem_with(draw(seed, trial), accounted)
        problems += [] if problem is None else [problem]
        unfinished += status not in ("completed", "failed")
    if unfinished > 2 * len(kept):
        problems.append(f"{unfinished} trials did not end")
    released = seconds_to_release([each.entries for each in kept], faults)
    by_kind: dict[str, list[float]] = {}
    for (trial, _), value in released.items():
        by_kind.setdefault(draw(seed, trial).kind, []).append(value)
    grown = [growth(each.samples, seconds) for each in kept]
    evaluations = len(results.evaluations)
    for rank, figures in enumerate(grown):
        if figures or seconds >= LONG_ENOUGH_SECONDS:
            problems += [f"rank {rank}: {text}" for text in too_much(figures, rank, evaluations)]
    return {
        "mpi": machine.mpi_library(),
        "trials": len(results.trials),
        "evaluations": evaluations,
        "statuses": dict(Counter(map(str, results.trials["status"]))),
        "released": by_kind,
        "injected": dict(Counter(draw(seed, trial).kind for trial, _ in faults)),
        "growth": grown,
        "problems": problems,
    }


def drive(options: argparse.Namespace) -> int:
    """Start the long job and the killed ones, and print what came of them."""
    print(machine.header(f"Soak: {options.seconds:g} s, seed {options.seed}"), flush=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="mpihpo-soak-") as folder:
        if options.seconds:
            failed |= not soaked(options, Path(folder))
        if options.kills:
            failed |= not killed(options, Path(folder))
    return 1 if failed else 0


def soaked(options: argparse.Namespace, folder: Path) -> bool:
    """Run the long job; returns whether all was well."""
    from tests.launch import MPIS, start_ranks

    arguments = [__file__, "--job", "--seconds", str(options.seconds), "--seed", str(options.seed)]
    arguments += ["--output", str(folder)]
    env = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    with start_ranks(MPIS[0], options.ranks, arguments, env=env, cwd=folder) as ranks:
        try:
            result = ranks.wait(options.seconds + CLOSING_SECONDS)
        except AssertionError as error:
            print(f"\nHANGS: {error}")
            return False
    file = folder / "figures.json"
    if not file.exists():
        print(f"\nFAILED: {result.describe()}")
        return False
    figures = json.loads(file.read_text())
    print_figures(figures, options.ranks)
    return not figures["problems"]


def print_figures(figures: Mapping[str, Any], ranks: int) -> None:
    """For people."""
    print(
        f"\n{figures['mpi']}, {ranks} ranks: {figures['trials']} trials, "
        f"{figures['evaluations']} evaluations, "
        + ", ".join(f"{number} {status}" for status, number in figures["statuses"].items())
    )
    print(f"\n{'fault':24} {'injected':>8}  seconds until its ranks train again: median, longest")
    for kind, number in sorted(figures["injected"].items()):
        seconds = figures["released"].get(kind)
        told = f"{median(seconds):8.3f} {max(seconds):8.3f}" if seconds else ""
        print(f"{kind:24} {number:8}  {told}")
    print("\ngrowth from 10-40 % of the time to what is beyond 70 %, by rank")
    kinds = next(filter(None, figures["growth"]), {})
    for kind in kinds:
        values = "  ".join(
            f"{grown[kind]:+8.1f}" if grown else f"{'':8}" for grown in figures["growth"]
        )
        print(f"{kind:16} {values}")
    print("\nevery trial accounted for, no growth" if not figures["problems"] else "")
    for problem in figures["problems"]:
        print(f"WRONG: {problem}")


def killed(options: argparse.Namespace, folder: Path) -> bool:
    """Kill a job again and again until it is done; returns whether it came to the same."""
    from tests.faults.comparing import check_same
    from tests.faults.killing import kill_until_done
    from tests.faults.running import INTERRUPTED, Player
    from tests.launch import MPIS

    rng = random.Random(options.seed)
    try:
        attempts = kill_until_done(folder / "killed", MPIS[0], rng, options.kills)
        check_same(folder / "killed", Player(folder).undisturbed(INTERRUPTED))
    except AssertionError as error:
        print(f"WRONG: {error}")
        return False
    print(f"\n{options.kills} times killed, {attempts} jobs: the same as one that was not")
    return True


def main() -> int:
    """Read the arguments; drive, or be one rank of the job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="of the long job; 0: without it")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="decides all faults")
    parser.add_argument("--kills", type=int, default=0, help="how often a short job is killed")
    parser.add_argument("--job", action="store_true", help="be a rank of the long job")
    parser.add_argument("--output", type=Path, help="with --job: a folder")
    options = parser.parse_args()
    if options.job:
        be_a_rank(options)
        return 0
    sys.path.insert(0, str(HERE.parent))  # the tests know how to start, to watch and to kill jobs
    return drive(options)


if __name__ == "__main__":
    sys.exit(main())
