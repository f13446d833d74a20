"""What is settled before anything trains: experiment, training function, folder, earlier jobs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import mpihpo
from mpihpo.errors import ExperimentError, ResultsError
from mpihpo.experiment import Experiment, load_experiment, load_train
from mpihpo.records import RungPlan
from mpihpo.report.progress import Progress
from mpihpo.results.entries import Provenance
from mpihpo.runner.recorder import CHECKPOINTS, JOURNAL, Recorder
from mpihpo.runner.resume import EarlierRun, check_same, digest_of, read_run
from mpihpo.schedule import scheduler_class

if TYPE_CHECKING:
    from mpihpo.comm.world import World
    from mpihpo.runner.trial import Trial

TrainFunction = Callable[[Any, "Trial"], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a job is asked to do; rank 0's counts, but for ``train``, which every rank has."""

    experiment: Experiment | Mapping[str, Any] | str | Path
    train: TrainFunction | None = None
    output: str | Path | None = None
    overrides: list[str] = field(default_factory=list)
    resume: bool = False
    """Go on with the run that is in the output folder."""
    force: bool = False
    """Resume even what differs from the run that is there."""
    takes_over: bool = False
    """Go on for a coordinator that has died in this very job: its folder is ours."""
    stream: TextIO | None = None
    """Where rank 0 shows progress; None: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What every rank knows before the first order."""

    experiment: Experiment
    train: TrainFunction
    directory: Path | None
    """The run's folder; None: nothing is written."""
    elapsed_seconds: float
    """Of earlier jobs in this folder."""
    earlier: EarlierRun | None
    """On rank 0, if this job resumes one."""


def prepare(world: World, request: Request) -> Preparation:
    """Settle everything; collective over the world.

    Raises:
        ExperimentError: On every rank: something is wrong with the request.
        ResultsError: On every rank: the run to be resumed cannot be read.
    """
    experiment: Experiment = world.on_root(lambda: _settle(request, world.size))
    train = _load_on_every_rank(world, request, experiment)
    directory: Path | None = world.on_root(lambda: _directory(request, experiment))
    earlier: EarlierRun | None = None

    def read_earlier() -> float:
        nonlocal earlier
        earlier = _earlier(request, experiment, train, directory)
        return 0.0 if earlier is None else earlier.seconds

    elapsed = world.on_root(read_earlier)
    return Preparation(
        experiment=experiment,
        train=train,
        directory=directory,
        elapsed_seconds=elapsed,
        earlier=earlier,
    )


def make_recorder(world: World, request: Request, preparation: Preparation) -> Recorder:
    """The recorder of a job; on one rank."""
    experiment = preparation.experiment
    planned = _planned_ladder(experiment)
    progress = None
    if request.stream is not None:
        progress = Progress(request.stream, planned, world.size, experiment.objective)
    return Recorder(
        experiment,
        Provenance(
            experiment_text=experiment.to_yaml(),
            seed=experiment.seed,
            versions=_versions(),
            nodes=world.node_names,
        ),
        digest_of(preparation.train),
        planned,
        preparation.directory,
        progress,
        preparation.earlier,
        takes_over=request.takes_over,
    )


def _settle(request: Request, ranks: int) -> Experiment:
    """The experiment, checked against the world; on one rank."""
    source = request.experiment
    if isinstance(source, Experiment):
        experiment = source
    elif isinstance(source, Mapping):
        experiment = Experiment.from_mapping(source)
    else:
        experiment = load_experiment(Path(source), request.overrides)
    if request.train is None and experiment.train is None:
        raise ExperimentError("train", "missing; expected module:function or path/file.py:function")
    experiment.check_world(ranks)
    return experiment


def _load_on_every_rank(world: World, request: Request, experiment: Experiment) -> TrainFunction:
    """The training function; collective over the world, so that no rank starts without."""
    train = request.train
    error: Exception | None = None
    if train is None:
        source = request.experiment
        folder = Path(source).parent if isinstance(source, (str, Path)) else Path()
        try:
            train = load_train(experiment.train, folder)
        except ExperimentError as problem:
            error = problem
    world.agree(error)
    assert train is not None
    return train


def _directory(request: Request, experiment: Experiment) -> Path | None:
    """The run's folder, made if need be; on one rank."""
    output = request.output or experiment.output
    if output is None:
        if request.resume:
            raise ExperimentError("output", "missing; expected the folder of the run to resume")
        return None
    directory = Path(output).absolute()
    holds_run = (directory / JOURNAL).exists()
    if request.resume and not holds_run:
        problem = f"{directory} holds no {JOURNAL}; expected the folder of the run to resume"
        raise ExperimentError("output", problem)
    if holds_run and not request.resume:
        problem = f"{directory} holds a run already; expected another folder, or --resume"
        raise ExperimentError("output", problem)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExperimentError("output", f"{directory} cannot be made: {error.strerror}") from error
    return directory


def _earlier(
    request: Request, experiment: Experiment, train: TrainFunction, directory: Path | None
) -> EarlierRun | None:
    """What there is to go on with; on one rank."""
    if not request.resume:
        return None
    assert directory is not None
    earlier = read_run(directory, JOURNAL, CHECKPOINTS)
    if not request.force:
        check_same(experiment, digest_of(train), earlier)
    planned, started = experiment.search.planned_trials, len(earlier.history.trials)
    if planned is not None and planned < started:
        problem = f"{planned} is fewer than the {started} trials that the run has started already"
        raise ExperimentError("search.trials", problem)
    known = set(experiment.search.space)
    for trial in earlier.history.trials.values():
        if not known.issuperset(trial.config):
            raise ResultsError(f"{directory}: trial {trial.id} has names that the space lacks")
    return earlier


def _planned_ladder(experiment: Experiment) -> tuple[RungPlan, ...]:
    trials = experiment.search.planned_trials
    if trials is None:
        return ()
    schedule = experiment.schedule
    planned: tuple[RungPlan, ...] = tuple(scheduler_class(schedule).ladder(schedule, trials))
    return planned


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    from mpi4py import MPI

    found = {"mpihpo": mpihpo.__version__, "python": platform.python_version()}
    for name in ("torch", "mpi4py", "numpy", "h5py"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["mpi"] = MPI.Get_library_version().splitlines()[0].strip("\0 ")[:80]
    return found
