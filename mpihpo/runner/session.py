"""A session: one coordinator's life, from an experiment that is prepared to what came out."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpihpo.allocation import Topology
from mpihpo.comm.devices import place_on_node
from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import wait_until
from mpihpo.coordinator import build_coordinator
from mpihpo.errors import CoordinatorLost, ExperimentError, InternalError, RankLost
from mpihpo.results.reader import Results
from mpihpo.runner.agent import Agent
from mpihpo.runner.dispatcher import Dispatcher
from mpihpo.runner.member import Equipment
from mpihpo.runner.orders import Leave, Saved
from mpihpo.runner.preparation import Preparation, Request, make_recorder
from mpihpo.runner.recorder import CHECKPOINTS, Recorder
from mpihpo.runner.saver import Saver
from mpihpo.runner.standing import nudges
from mpihpo.runner.state import Keeper, KeptState
from mpihpo.runner.torch_set_up import torch_set_up
from mpihpo.runner.worker import Worker
from mpihpo.search import build_searcher

if TYPE_CHECKING:
    from mpihpo.comm.world import World

_SWITCH_SECONDS = 0.0005
_RESULTS_SECONDS = 30.0  # for rank 0 to send them from another thread


@dataclass(frozen=True, slots=True)
class Ended:
    """What a job came to."""

    results: Results | None
    """None where rank 0, which has them, is dead."""
    reason: str
    unwritten: str | None
    """What could not be written to disk; None if all was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the owner of the process is called for."""

    with_agent: Callable[[Agent], None] | None = None
    """On each rank, once it has its agent."""
    if_stranded: Callable[[Ended], None] | None = None
    """On rank 0, from another thread, when the job is over and its own training function does not
    return."""


def hold_session(
    world: World,
    request: Request,
    preparation: Preparation,
    *,
    ends_at: float | None = None,
    hooks: Hooks,
) -> Ended:
    """Train until the experiment is over; collective over the world.

    Ranks that do not come to its end are in ``world.lost`` afterwards.

    Args:
        world: The ranks.
        request: What was asked for.
        preparation: What was settled.
        ends_at: When the job's time is over, by this rank's `time.monotonic`; None: never.
        hooks: Of the owner of the process.

    Raises:
        ExperimentError: On every rank: the output folder cannot be written or is in use.
        InternalError: On every rank: a fault of the runtime.
        CoordinatorLost: On the ranks that are left: rank 0 is dead, or silent.
        RankLost: On a rank that was set aside and is back when the others have ended the job.
    """
    experiment = preparation.experiment
    with ExitStack() as stack:
        backend, device = stack.enter_context(torch_set_up(world, experiment))
        # Every rank's clock starts when all have arrived; their skew is that of a barrier.
        world.comm.Barrier()
        started = time.monotonic() - preparation.elapsed_seconds

        def clock() -> float:
            return time.monotonic() - started

        deadline = None if ends_at is None else ends_at - started
        keeper = Keeper()
        heartbeat = experiment.limits.heartbeat_seconds
        agent = stack.enter_context(Agent(world, keeper, heartbeat_seconds=heartbeat))
        agent.can_nudge = stack.enter_context(nudges(agent.should_leave))
        if hooks.with_agent is not None:
            hooks.with_agent(agent)
        world.serve = agent.serve
        stack.callback(setattr, world, "serve", lambda: None)
        training = experiment.training_range(world.size)
        dispatcher, recorder = _dispatch(
            world, request, preparation, training, clock, deadline, stack
        )
        if world.rank in training:
            saver = stack.enter_context(_saver(world, preparation))
            local_rank, _ = place_on_node(world.node_of, world.rank, training)
            equipment = Equipment(
                world=world,
                experiment=experiment,
                train=preparation.train,
                backend=backend,
                device=device,
                local_rank=local_rank,
                directory=preparation.directory,
                keeper=keeper,
                agent=agent,
                saver=saver,
                clock=clock,
                deadline=deadline,
            )

            def end_stranded(leave: Leave) -> None:
                if leave.fault is not None:
                    return  # the others end the job
                assert recorder is not None
                results = Results.from_tables(recorder.tables, preparation.directory)
                for rank in set(range(world.size)).difference(leave.lost):
                    world.mailbox.post(results, rank, Tag.ORDER)
                if hooks.if_stranded is not None:
                    hooks.if_stranded(_ended(leave, results))

            leave = _work(world, Worker(equipment), dispatcher, agent, end_stranded)
        else:
            assert dispatcher is not None  # on the rank of a dedicated coordinator
            dispatcher.begin()
            dispatcher.run()
            assert dispatcher.farewell is not None
            leave = dispatcher.farewell
        return _gather(world, leave, recorder, preparation.directory)


def _work(
    world: World,
    worker: Worker,
    dispatcher: Dispatcher | None,
    agent: Agent,
    end_stranded: Callable[[Leave], None],
) -> Leave:
    """Train until told to leave; world rank 0 dispatches beside it.

    ``end_stranded`` is called there if the others end the job without this rank.
    """
    if dispatcher is None:
        return _run(worker, world, agent)
    dispatcher.begin()
    if world.threads_may_call:
        # Else a training function in pure Python would keep the dispatcher waiting for 5 ms.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)

        def dispatch() -> None:
            dispatcher.run()
            leave = dispatcher.farewell
            if leave is not None and world.rank in leave.lost:
                end_stranded(leave)

        thread = threading.Thread(target=dispatch, name="mpihpo dispatcher", daemon=True)
        thread.start()
        try:
            leave = worker.run()
        finally:
            thread.join()
            sys.setswitchinterval(interval)
        return leave

    def serve() -> None:
        agent.serve()
        dispatcher.step()

    world.serve = serve
    leave = worker.run()
    if world.rank in leave.lost:
        end_stranded(leave)
    return leave


def _run(worker: Worker, world: World, agent: Agent) -> Leave:
    """The work of a rank other than 0."""
    try:
        return worker.run()
    except CoordinatorLost:
        if 0 not in world.dead:
            # Silent ranks may be stuck for ever, and nobody is left to say which ones are.
            world.lost = agent.gone | {0}
            world.leave()
        raise


def _saver(world: World, preparation: Preparation) -> Saver:
    def tell(state: KeptState, problem: str | None, size: int) -> None:
        world.mailbox.post(Saved(state.trial_id, state.epoch, problem, size), 0, Tag.EVENT)

    directory = preparation.directory
    folder = None if directory is None else directory / CHECKPOINTS
    return Saver(folder, tell, in_thread=world.threads_may_call)


def _dispatch(
    world: World,
    request: Request,
    preparation: Preparation,
    training: range,
    clock: Callable[[], float],
    deadline: float | None,
    stack: ExitStack,
) -> tuple[Dispatcher | None, Recorder | None]:
    """Dispatcher and open recorder on world rank 0; collective over the world."""
    dispatcher = recorder = None
    error: Exception | None = None
    if world.rank == 0:
        try:
            recorder = stack.enter_context(make_recorder(world, request, preparation).open())
            dispatcher = _dispatcher(world, preparation, recorder, training, clock, deadline)
        except OSError as problem:
            text = f"{preparation.directory} cannot be written: {problem}"
            error = ExperimentError("output", text)
        except Exception as problem:
            error = problem
    world.agree(error)
    return dispatcher, recorder


def _dispatcher(
    world: World,
    preparation: Preparation,
    recorder: Recorder,
    training: range,
    clock: Callable[[], float],
    deadline: float | None,
) -> Dispatcher:
    experiment = preparation.experiment
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
        retries=experiment.limits.retries,
        deadline=deadline,
        state_bytes=experiment.limits.state_bytes,
        ranks_can_die=world.survives_deaths,
    )
    if preparation.earlier is not None:
        coordinator.replay(preparation.earlier.history)
    return Dispatcher(
        world,
        coordinator,
        recorder,
        training_ranks=training,
        clock=clock,
        deadline=deadline,
        limits=experiment.limits,
    )


def _gather(world: World, leave: Leave, recorder: Recorder | None, directory: Path | None) -> Ended:
    """The job's end, equal on all ranks; collective over those that are not lost."""
    is_lost = world.rank in leave.lost
    if is_lost:  # and is back, too late
        world.lost = frozenset(leave.lost)
        world.leave()
    else:
        world.set_aside(leave.lost)
    if leave.fault is not None:
        raise InternalError(f"the job failed, and not one of its trials:\n{leave.fault}")
    results = None if recorder is None else Results.from_tables(recorder.tables, directory)
    if is_lost and results is None:
        raise RankLost("this rank came back from a trial when the others had ended the job")
    if 0 in leave.lost:
        return _ended(leave, results if is_lost else _sent(world))
    return _ended(leave, world.meeting.bcast(results, 0))


def _sent(world: World) -> Results | None:
    """The results, from another thread of rank 0, which is stuck; None where it is dead."""
    found: list[Results] = []

    def is_here() -> bool:
        mail = world.mailbox.take(Tag.ORDER)
        if mail is not None and isinstance(mail[1], Results):
            found.append(mail[1])
        return bool(found) or 0 in world.dead

    wait_until(is_here, timeout_seconds=_RESULTS_SECONDS)
    return found[0] if found else None


def _ended(leave: Leave, results: Results | None) -> Ended:
    return Ended(results, leave.reason, leave.unwritten)
