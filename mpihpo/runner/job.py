"""A whole job: from an experiment and a communicator to results, on every rank."""

from __future__ import annotations

import logging
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import mpihpo
from mpihpo.allocation import Topology
from mpihpo.coordinator import build_coordinator
from mpihpo.errors import ExperimentError, InternalError
from mpihpo.experiment import Experiment, load_experiment, load_train
from mpihpo.instructions import COMPLETED, EVERY_TRIAL_FAILED
from mpihpo.records import RungPlan, Status
from mpihpo.report.progress import Progress
from mpihpo.results.entries import Provenance
from mpihpo.results.reader import Results
from mpihpo.runner.agent import Agent
from mpihpo.runner.dispatcher import Dispatcher
from mpihpo.runner.orders import Leave
from mpihpo.runner.recorder import JOURNAL, Recorder
from mpihpo.runner.state import Keeper
from mpihpo.runner.torch_set_up import torch_set_up
from mpihpo.runner.worker import Worker
from mpihpo.schedule import scheduler_class
from mpihpo.search import build_searcher

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpihpo.comm.world import World
    from mpihpo.runner.trial import Trial

logger = logging.getLogger(__name__)

STOPPED_EARLY = 75
FAULT = 70
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    train: Callable[[Any, Trial], object] | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    output: str | Path | None = None,
) -> Results:
    """Run an experiment on the ranks of a communicator.

    Collective over ``comm``, which is duplicated and otherwise left alone.

    Args:
        experiment: An `Experiment`, plain mappings, or the path of a YAML file; rank 0's counts.
        train: The training function, on every rank; None: the one that the experiment names.
        comm: Any intracommunicator; None: ``MPI.COMM_WORLD``.
        output: Folder of the results; None: the experiment's ``output``, or none at all.

    Returns:
        The same results on every rank.

    Raises:
        ExperimentError: On every rank: the experiment is wrong, or the world too small for it.
        InternalError: On every rank: a fault of the runtime.
    """
    if comm is None:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    from mpihpo.comm.world import World

    with World(comm) as world:
        return _run(world, experiment, train, output, None, lambda agent: None).results


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a job came to."""

    results: Results
    reason: str


def _run(
    world: World,
    experiment: Experiment | Mapping[str, Any] | str | Path,
    train: Callable[[Any, Trial], object] | None,
    output: str | Path | None,
    stream: TextIO | None,
    with_agent: Callable[[Agent], None],
    overrides: list[str] | None = None,
) -> _Ended:
    """`run` on a world; collective over it. ``with_agent`` is called once the rank has one."""
    folder = experiment.parent if isinstance(experiment, Path) else Path()
    if isinstance(experiment, str):
        folder = Path(experiment).parent
    source = experiment
    settled: Experiment = world.on_root(
        lambda: _settle(source, overrides or [], world.size, train is None)
    )
    train = _load_on_every_rank(world, settled, train, folder)
    directory = world.on_root(lambda: _make_directory(output or settled.output))
    with ExitStack() as stack:
        backend, device = stack.enter_context(torch_set_up(world, settled))
        keeper = Keeper()
        # Every rank's clock starts when all have arrived; their skew is that of a barrier.
        world.comm.Barrier()
        started = time.monotonic()

        def clock() -> float:
            return time.monotonic() - started

        agent = stack.enter_context(Agent(world, keeper))
        with_agent(agent)
        world.serve = agent.serve
        stack.callback(setattr, world, "serve", lambda: None)
        tables, reason, fault = None, "", None
        training = settled.training_range(world.size)
        recorder = None
        dispatcher = None
        thread = None
        error: Exception | None = None
        if world.rank == 0:
            try:
                recorder = stack.enter_context(_recorder(world, settled, directory, stream).open())
                dispatcher = _dispatcher(world, settled, recorder, training, clock)
            except OSError as problem:
                error = ExperimentError("output", f"{directory} cannot be written: {problem}")
            except Exception as problem:
                error = problem
        world.agree(error)
        if world.rank in training:
            worker = Worker(
                world=world,
                experiment=settled,
                train=train,
                backend=backend,
                device=device,
                directory=directory,
                keeper=keeper,
                agent=agent,
                clock=clock,
            )
        if dispatcher is not None:
            dispatcher.begin()
            if world.rank not in training:
                dispatcher.run()
            elif world.threads_may_call:
                thread = dispatcher.start_thread()
            else:
                world.serve = _both(agent.serve, dispatcher.step)
        leave: Leave | None = worker.run() if world.rank in training else None
        if thread is not None:
            thread.join()
        if leave is not None:
            reason, fault = leave.reason, leave.fault
        reason, fault = world.comm.bcast((reason, fault), training[0])
        if fault is not None:
            raise InternalError(f"the job failed, and not one of its trials:\n{fault}")
        if recorder is not None:
            tables = Results.from_tables(recorder.tables, directory)
        results: Results = world.comm.bcast(tables, 0)
    return _Ended(results, reason)


def _both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    def serve() -> None:
        first()
        second()

    return serve


def _settle(
    source: Experiment | Mapping[str, Any] | str | Path,
    overrides: list[str],
    ranks: int,
    needs_train: bool,
) -> Experiment:
    """The experiment, checked against the world; on one rank."""
    if isinstance(source, Experiment):
        experiment = source
    elif isinstance(source, Mapping):
        experiment = Experiment.from_mapping(source)
    else:
        experiment = load_experiment(Path(source), overrides)
    if needs_train and experiment.train is None:
        raise ExperimentError("train", "missing; expected module:function or path/file.py:function")
    experiment.check_world(ranks)
    return experiment


def _load_on_every_rank(
    world: World,
    experiment: Experiment,
    train: Callable[[Any, Trial], object] | None,
    folder: Path,
) -> Callable[[Any, Trial], object]:
    """The training function; collective over the world, so that no rank starts without."""
    error: Exception | None = None
    if train is None:
        try:
            train = load_train(experiment.train, folder)
        except ExperimentError as problem:
            error = problem
    world.agree(error)
    assert train is not None
    return train


def _make_directory(output: str | Path | None) -> Path | None:
    """The run's folder, made; on one rank."""
    if output is None:
        return None
    directory = Path(output).absolute()
    if (directory / JOURNAL).exists():
        problem = f"{directory} holds a run already; expected another folder, or move that one away"
        raise ExperimentError("output", problem)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExperimentError("output", f"{directory} cannot be made: {error.strerror}") from error
    return directory


def _recorder(
    world: World, experiment: Experiment, directory: Path | None, stream: TextIO | None
) -> Recorder:
    planned = _planned_ladder(experiment)
    provenance = Provenance(
        experiment_text=experiment.to_yaml(),
        seed=experiment.seed,
        versions=_versions(),
        nodes=world.node_names,
    )
    progress = None
    if stream is not None:
        progress = Progress(stream, planned, world.size, experiment.objective)
    return Recorder(experiment, provenance, planned, directory, progress)


def _planned_ladder(experiment: Experiment) -> tuple[RungPlan, ...]:
    trials = experiment.search.planned_trials
    if trials is None:
        return ()
    schedule = experiment.schedule
    planned: tuple[RungPlan, ...] = tuple(scheduler_class(schedule).ladder(schedule, trials))
    return planned


def _dispatcher(
    world: World,
    experiment: Experiment,
    recorder: Recorder,
    training: range,
    clock: Callable[[], float],
) -> Dispatcher:
    coordinator = build_coordinator(
        searcher=build_searcher(
            experiment.search, seed=experiment.seed, mode=experiment.objective.mode
        ),
        trials=experiment.search.planned_trials,
        schedule=experiment.schedule,
        allocation=experiment.allocation,
        objective=experiment.objective,
        seed=experiment.seed,
        topology=Topology(world.node_of),
        training_ranks=training,
    )
    return Dispatcher(
        world,
        coordinator,
        recorder,
        training_ranks=training,
        clock=clock,
        time_seconds=experiment.limits.time_seconds,
        trial_seconds=experiment.limits.trial_seconds,
    )


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


# The command.


def main(path: Path, *, output: str | None, overrides: list[str], quiet: bool) -> int:
    """`python -m mpihpo run`: one job on ``MPI.COMM_WORLD``; collective over it.

    Returns:
        The exit status, equal on all ranks.
    """
    from mpi4py import MPI

    from mpihpo.comm.world import World

    world = World(MPI.COMM_WORLD)
    sys.excepthook = _aborting(sys.excepthook)
    stream = None if quiet or world.rank != 0 else sys.stdout
    try:
        with _signals() as with_agent:
            ended = _run(world, path, None, output, stream, with_agent, overrides)
    except ExperimentError as error:
        _say(world, " ".join(str(error).split()))
        world.close()
        return 2
    except InternalError as error:
        _say(world, str(error))
        world.close()
        return FAULT
    if world.rank == 0:
        sys.stdout.write(ended.results.summary() + "\n")
        sys.stdout.flush()
    world.close()
    return _exit_status(ended)


def _say(world: World, text: str) -> None:
    """Tell the user once what every rank knows."""
    if world.rank == 0:
        sys.stderr.write(f"mpihpo: {text}\n")
        sys.stderr.flush()


def _exit_status(ended: _Ended) -> int:
    if ended.reason not in (COMPLETED, EVERY_TRIAL_FAILED):
        return STOPPED_EARLY
    statuses = {trial["status"] for trial in ended.results.trials}
    return 0 if Status.COMPLETED.value in statuses else 1


def _aborting(excepthook: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that ends the job: an uncaught error on one rank would leave it hanging."""

    def hook(*args: Any) -> None:
        from mpi4py import MPI

        excepthook(*args)
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(FAULT)

    return hook


@contextmanager
def _signals() -> Iterator[Callable[[Agent], None]]:
    """Signals that ask the job to stop, for as long as it lasts."""
    agents: list[Agent] = []

    def handle(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if not agents:
            raise SystemExit(STOPPED_EARLY)
        agents[0].signal(name)

    before = {name: signal.signal(getattr(signal, name), handle) for name in _SIGNALS}
    try:
        yield agents.append
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
