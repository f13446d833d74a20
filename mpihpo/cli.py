"""The commands: arguments in, an exit status out.

0: finished. 1: every trial failed. 2: a wrong experiment or wrong arguments. 70: a fault of ours.
75: stopped early.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import mpihpo
from mpihpo.errors import ExperimentError, MpihpoError, ResultsError

if TYPE_CHECKING:
    from mpihpo.experiment import Experiment

# Which of the job's processes this one is, before MPI could be asked: Open MPI, PMIx, PMI, Slurm.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; None: those of this process.

    Returns:
        The exit status.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Configurations and errors hold any text, and a batch job's output is often plain ASCII.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        parser = _parser()
        arguments = parser.parse_args(argv)
        if arguments.command == "run" and arguments.force and not arguments.resume:
            parser.error("--force goes with --resume only")
    except SystemExit as end:
        return int(end.code or 0)
    try:
        if arguments.command == "check":
            return _check(arguments.experiment, arguments.set, arguments.ranks)
        from mpihpo.runner.command import main as run_job

        return run_job(
            arguments.experiment,
            output=arguments.output,
            overrides=arguments.set,
            quiet=arguments.quiet,
            resume=arguments.resume,
            force=arguments.force,
        )
    except MpihpoError as error:
        if _is_first_process():
            sys.stderr.write(f"mpihpo: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, (ExperimentError, ResultsError)) else 70


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and only once in a job of many ranks."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        line = f"{self.prog}: {message}; see {self.prog} --help\n"
        self.exit(2, line if _is_first_process() else None)


def _is_first_process() -> bool:
    """Whether this is the process of a job that speaks for all."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0") == "0"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mpihpo", description=mpihpo.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mpihpo {mpihpo.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        help="run an experiment on all ranks of this MPI job",
        description="Run an experiment on all ranks of this MPI job, started by srun or mpiexec.",
    )
    _add_experiment(run)
    run.add_argument(
        "--output", metavar="DIR", help="folder of the results, instead of the experiment's"
    )
    run.add_argument(
        "--resume", action="store_true", help="go on with the run that is in the output folder"
    )
    run.add_argument(
        "--force",
        action="store_true",
        help="resume although the space, the training function or the schedule has changed",
    )
    run.add_argument("--quiet", action="store_true", help="report warnings and errors only")

    check = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="validate an experiment and print its plan, without MPI",
        description="Validate an experiment, import its training function and print the plan.",
    )
    _add_experiment(check)
    check.add_argument(
        "--ranks", type=_count, metavar="N", help="size of the job to check and plan for"
    )
    return parser


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="a YAML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a value of the file, such as search.trials=8; may be given several times",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _check(path: Path, overrides: list[str], ranks: int | None) -> int:
    from mpihpo.experiment import load_experiment, load_train

    experiment = load_experiment(path, overrides)
    if ranks is not None:
        experiment.check_world(ranks)
    load_train(experiment.train, path.parent)
    sys.stdout.write("\n".join(_plan(experiment, ranks)) + "\n")
    return 0


def _plan(experiment: Experiment, ranks: int | None) -> list[str]:
    """The lines that tell what the experiment will do, on ``ranks`` ranks if given."""
    search, schedule, allocation = experiment.search, experiment.schedule, experiment.allocation
    trials = search.planned_trials
    amount = "as many configurations as it has" if trials is None else f"{trials} configurations"
    lines = [
        f"train       {experiment.train}",
        f"objective   {experiment.objective.metric}, {experiment.objective.mode}",
        f"search      {search.searcher}, {amount}, seed {experiment.seed}",
    ]
    width = max(len(name) for name in search.space)
    for name, domain in search.space.items():
        given = (
            f"{other} is {' or '.join(str(value) for value in values)}"
            for other, values in domain.when
        )
        when = f"  when {' and '.join(given)}" if domain.when else ""
        lines.append(f"  {name:{width}}  {domain}{when}")
    lines.append(f"schedule    {schedule.scheduler}, reduction_factor {schedule.reduction_factor}")
    lines += [] if trials is None else _ladder(experiment, trials, ranks)
    most = "" if allocation.max_ranks is None else f", max_ranks {allocation.max_ranks}"
    lines.append(f"allocation  {allocation.policy}, ranks {allocation.ranks}{most}")
    return lines


def _ladder(experiment: Experiment, trials: int, ranks: int | None) -> list[str]:
    """The planned ladder as a table, with the ranks that a trial needs on ``ranks`` ranks."""
    from mpihpo.allocation import build_policy
    from mpihpo.records import Evaluation, TrialRecord, epochs_text
    from mpihpo.schedule import scheduler_class

    schedule = experiment.schedule
    rows = [["rung", "epochs", "trials"]]
    plans = scheduler_class(schedule).ladder(schedule, trials)
    for plan in plans:
        rows.append([str(plan.rung), epochs_text(plan.start, plan.stop), str(plan.trials)])
    if ranks is not None:
        policy = build_policy(
            experiment.allocation,
            reduction_factor=schedule.reduction_factor,
            world_size=experiment.training_ranks(ranks),
        )
        trial = TrialRecord(id=0, config={}, seed=0)
        rows[0].append("ranks per trial")
        for row, plan in zip(rows[1:], plans, strict=True):
            evaluation = Evaluation(trial=trial, rung=plan.rung, start=plan.start, stop=plan.stop)
            row.append(str(policy.width(evaluation)))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    aligned = (
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return [f"  {row}" for row in aligned]
