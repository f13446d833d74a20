"""State from group to group: a member is given allocations, as by the dispatcher."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import wait_until
from mpihpo.comm.world import World
from mpihpo.errors import StateError
from mpihpo.experiment import Experiment
from mpihpo.records import Allocation, Ending, Evaluation, Outcome, TrialRecord
from mpihpo.runner.agent import Agent
from mpihpo.runner.handover import broadcast_parts, channel_of, receive_state, send_state
from mpihpo.runner.member import Equipment, Member
from mpihpo.runner.orders import Ended
from mpihpo.runner.saver import Saver
from mpihpo.runner.state import GENERATORS, Keeper, KeptState, take, take_generators
from tests.mpi.programs.surroundings import error_from, group_of

WORLD = MPI.COMM_WORLD
TRIAL = TrialRecord(id=3, config={}, seed=11)
Train = Callable[[Any, Any], object]


class Course:
    """A rank that is given one evaluation of a trial after the other."""

    def __init__(self, world: World, keeper: Keeper, agent: Agent, backend: str | None) -> None:
        self.world, self.keeper, self.agent, self.backend = world, keeper, agent, backend
        self.serial = 0
        self.epoch = 0
        self.experiment = Experiment.from_mapping(
            {
                "objective": {"metric": "loss"},
                "search": {"trials": 1, "space": {"x": {"choices": [1]}}},
                "schedule": {"max_epochs": 64},
            }
        )

    def evaluate(
        self, train: Train, ranks: tuple[int, ...], holders: tuple[int, ...], goes: bool = True
    ) -> Outcome:
        """One more epoch on these ranks; collective over the world. The leader keeps the state."""
        self.serial += 1
        evaluation = Evaluation(trial=TRIAL, rung=self.epoch, start=self.epoch, stop=self.epoch + 1)
        allocation = Allocation(
            serial=self.serial,
            evaluation=evaluation,
            ranks=ranks,
            holders=holders,
            keepers=ranks[:1],
        )
        if self.world.rank in ranks:
            equipment = Equipment(
                world=self.world,
                experiment=self.experiment,
                train=train,
                backend=self.backend,
                device=torch.device("cpu"),
                local_rank=self.world.rank,
                directory=None,
                keeper=self.keeper,
                agent=self.agent,
                saver=Saver(None, lambda state, problem, size: None, in_thread=False),
                clock=time.monotonic,
            )
            Member(equipment, allocation).take_part()
        outcome = self._outcome(allocation)
        if goes:
            assert outcome.ending is Ending.FINISHED, outcome.failure
            self.epoch += 1
        return outcome

    def _outcome(self, allocation: Allocation) -> Outcome:
        found: list[Outcome] = []

        def arrived() -> bool:
            while (mail := self.world.mailbox.take(Tag.EVENT)) is not None:
                if isinstance(mail[1], Ended):
                    found.append(mail[1].outcome(allocation))
            return bool(found)

        if self.world.rank == 0:
            wait_until(arrived, check=self.world.serve)
        outcome: Outcome = self.world.comm.bcast(found[0] if found else None, 0)
        return outcome


@contextmanager
def course(backend: str | None) -> Iterator[Course]:
    world = World(WORLD)
    keeper = Keeper()
    with Agent(world, keeper, heartbeat_seconds=60.0) as agent:
        world.serve = agent.serve
        yield Course(world, keeper, agent, backend)
    world.close()


# What is attached.


class Pair(NamedTuple):
    left: Any
    right: Any


class Counter:
    """An object with a state of its own, of everything that may stand in one."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "number": 0,
            "text": "ä",
            "none": None,
            "flag": True,
            "float": 0.1,
            "bytes": b"\x00\xff",
            "nested": [(1, 2.5), {"deep": np.arange(3)}, Pair(torch.ones(2), "right")],
            3: {"a key that is no text"},
            "objects": np.array(["text", None, 7], dtype=object),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Tied(torch.nn.Module):
    """Tied parameters, buffers of several types, and a leaf too large to be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.normal = torch.nn.BatchNorm1d(6)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("large", torch.randn(300, 300))
        self.register_buffer("mask", torch.rand(64) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.normal(self.first(x))))


def make() -> dict[str, Any]:
    """Objects whose values differ on each rank and each time."""
    rng = np.random.default_rng()
    torch.seed()  # the global generator may stand where it stood a rung ago
    model, other = Tied(), torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    adam = torch.optim.AdamW(other.parameters(), lr=0.01, amsgrad=True)
    return {
        "model": model,
        "other": other,
        "sgd": sgd,
        "adam": adam,
        "schedule": torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=10),
        "floats": rng.random((3, 2)),
        "fortran": np.asfortranarray(rng.random((4, 3))),
        "strided": rng.random((6, 4))[::2, ::-1],
        "scalar": np.array(rng.random()),
        "empty": np.zeros((0, 3), dtype=np.float32),
        "flags": rng.random(64) > 0.5,
        "complex": rng.random(2) + 1j * rng.random(2),
        "bfloat16": torch.rand(3).to(torch.bfloat16),
        "float64": torch.rand(2, 2, dtype=torch.float64),
        "no_dimension": torch.rand(()),
        "no_element": torch.rand(0, 2),
        "transposed": torch.rand(3, 4).t(),
        "counter": Counter(),
    }


def advance(things: Mapping[str, Any]) -> None:
    """One step of training, the same on all ranks."""
    batch = torch.arange(24.0).reshape(4, 6) + things["floats"].sum()
    for optimizer, out in (
        (things["sgd"], things["model"](batch)),
        (things["adam"], things["other"](batch[:, :3].float())),
    ):
        optimizer.zero_grad()
        out.pow(2).mean().backward()
        optimizer.step()
    things["schedule"].step()
    things["cosine"].step()
    for name in ("floats", "fortran", "strided", "scalar", "complex", "bfloat16", "float64"):
        things[name][...] += 1
    things["flags"][...] = ~things["flags"]
    things["counter"].state["number"] += 1
    things["counter"].state["nested"][1]["deep"] += 1


def digest(thing: Any) -> str:
    """A digest of values and types, whatever holds them."""
    lines: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous()
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            lines.append(f"tensor {value.dtype} {tuple(value.shape)} {raw.hex()}")
        elif isinstance(value, np.ndarray):
            lines.append(f"array {value.dtype} {value.shape} {value.tolist()}")
        elif isinstance(value, Mapping):
            for key in value:
                lines.append(f"{key!r}:")
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            lines.append(type(value).__name__)
            for each in value:
                walk(each)
        else:
            lines.append(repr(value))

    walk(thing.state_dict() if hasattr(thing, "state_dict") else thing)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def digests(things: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(thing) for name, thing in things.items()}


GROUPS: list[tuple[tuple[int, ...], bool]] = [
    # The ranks of each rung, and whether the holder of the state is one of them.
    ((2,), False),
    ((2, 0), True),
    ((0, 3), False),
    ((1, 2, 3, 0), True),
    ((3, 2, 0), False),
    ((2, 0, 3), True),
    ((1,), False),
]


def everything(backend: str) -> None:
    """On growing, shrinking, overlapping and disjoint groups; ``backend`` is gloo or none."""
    left: dict[str, str] = {}  # digests at the end of the rung before, on every rank

    def train(config: Any, trial: Any) -> None:
        things = make()
        if trial.start:
            for name, thing in things.items():
                stale = name not in ("empty", "no_element", "schedule", "cosine", "counter")
                assert not stale or digest(thing) != left[name], f"{name} would prove nothing"
        trial.attach(**things)
        everybody = trial.comm.allgather(digests(things))
        assert all(each == everybody[0] for each in everybody), different(everybody)
        if trial.start:
            assert everybody[0] == left, different([everybody[0], left])
            momenta = things["sgd"].state_dict()["state"]
            assert momenta, "the optimizer has no state"
            assert all(float(each["momentum_buffer"].norm()) > 0 for each in momenta.values())
            assert things["adam"].state_dict()["state"][0]["step"].item() == trial.start
        model = things["model"]
        assert model.first.weight is model.second.weight
        assert model.second.weight in things["sgd"].param_groups[0]["params"]
        advance(things)
        now = digests(things)
        others = trial.comm.allgather(now)
        assert all(each == now for each in others), different(others)
        fresh.append(now)
        trial.report(trial.stop, loss=1.0)

    fresh: list[dict[str, str]] = []
    with course(None if backend == "none" else backend) as steps:
        holders: tuple[int, ...] = ()
        for ranks, holder_is_inside in GROUPS:
            assert holder_is_inside == bool(set(holders) & set(ranks))
            fresh.clear()
            steps.evaluate(train, ranks, holders)
            gathered = WORLD.allgather(fresh[0] if fresh else None)
            left = gathered[ranks[0]]
            if steps.world.rank in holders and steps.world.rank != ranks[0]:
                steps.keeper.forget(TRIAL.id)
            holders = ranks[:1]
            check_kept(steps, holders[0])
    assert len(left) == len(make())


def different(each: list[dict[str, str]]) -> str:
    names = [name for name in each[0] if any(other.get(name) != each[0][name] for other in each)]
    return f"differ: {names}"


def check_kept(steps: Course, holder: int) -> None:
    kept = steps.keeper.get(TRIAL.id, steps.epoch)
    assert (kept is not None) == (WORLD.rank == holder)


def fingerprints() -> None:
    """What a rank is sent, and what a group gets by broadcast, is what was kept."""
    with course(None) as steps:
        world = steps.world
        source = 1
        kept = KeptState(7, 4, {})
        if world.rank == source:
            parts = {name: take(thing, copy=True) for name, thing in make().items()}
            kept = KeptState(7, 4, parts | {GENERATORS: take_generators()})
        right = world.comm.bcast(kept.fingerprint, source)
        assert world.rank == source or kept.fingerprint != right
        other_state = KeptState(8, 1, kept.parts)
        channel = channel_of(2, world.tag_limit)

        if world.rank == source:
            for other in (0, 2, 3):
                send_state(world.mailbox, other_state, other, channel_of(1, world.tag_limit))
                send_state(world.mailbox, kept, other, channel)
        else:
            # A transfer that nobody received does not get into the way of a later one.
            received = receive_state(world.mailbox, source, channel, world.serve)
            assert received.fingerprint == right
            assert (received.trial_id, received.epoch) == (7, 4)
            assert received.nbytes > 300 * 300 * 4
        serial = 0
        for backend in (None, "gloo"):
            for ranks in ((0, 1), (3, 2, 1, 0), (1, 0, 2)):
                serial += 1
                if world.rank not in ranks:
                    continue
                with group_of(world, steps.agent, serial, ranks, backend) as group:
                    given = kept.parts if world.rank == source else None
                    device = torch.device("cpu")
                    parts = broadcast_parts(group, given, ranks.index(source), device)
                    assert KeptState(7, 4, parts).fingerprint == right


def generators_continue() -> None:
    """Three generators go on where the leader's were, on every rank."""
    drawn: list[tuple[float, ...]] = []

    def train(config: Any, trial: Any) -> None:
        random.seed(1000 + WORLD.rank)
        np.random.seed(1000 + WORLD.rank)
        torch.manual_seed(1000 + WORLD.rank)
        trial.attach(anything=np.zeros(1))
        if trial.start == 0:
            seed_all(trial.seed)
        draws = trial.comm.allgather(draw())
        assert all(each == draws[0] for each in draws), "the ranks draw different numbers"
        drawn.append(draws[0])
        trial.report(trial.stop, loss=1.0)

    seen = []
    with course("gloo") as steps:
        holders: tuple[int, ...] = ()
        for ranks, _ in GROUPS[:4]:
            drawn.clear()
            steps.evaluate(train, ranks, holders)
            seen.append(WORLD.allgather(drawn)[ranks[0]][0])
            holders = ranks[:1]
    seed_all(TRIAL.seed)
    assert seen == [draw() for _ in seen], "not the numbers of a trial that never moved"


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> tuple[float, ...]:
    return (random.random(), float(np.random.random()), float(torch.rand(())))


def what_does_not_fit() -> None:
    """A StateError that names the object, on whichever rank; the ranks can go on."""
    right: dict[str, Callable[[], Any]] = {
        "layer": lambda: torch.nn.Linear(2, 3),
        "array": lambda: np.zeros((2, 2)),
        "tensor": lambda: torch.zeros(4),
        "optimizer": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
    }
    wrong: dict[str, Callable[[], Any]] = {
        "layer": lambda: torch.nn.Linear(2, 4),
        "array": lambda: np.zeros((2, 3)),
        "tensor": lambda: torch.zeros(5),
        "optimizer": lambda: torch.optim.SGD(
            [torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)], lr=0.1
        ),
    }

    def train(config: Any, trial: Any) -> None:
        things = {name: function() for name, function in right.items()}
        if misfit in wrong and trial.rank in on:
            things[misfit] = wrong[misfit]()
        if misfit == "unknown":
            things["unknown"] = np.zeros(1)
        trial.attach(**things)
        trial.report(trial.stop, loss=1.0)

    with course("gloo") as steps:
        misfit, on = "", set(range(4))
        steps.evaluate(train, (1, 0), ())
        for misfit in (*wrong, "unknown"):
            for places in ({0, 1, 2}, {2}) if misfit != "unknown" else ({0, 1, 2},):
                on = places
                outcome = steps.evaluate(train, (0, 1, 2), (1,), goes=False)
                assert outcome.ending is Ending.FAILED
                failure = outcome.failure
                assert failure is not None
                assert failure.kind == "StateError", failure
                assert f"attach({misfit}=...)" in failure.message, failure
                assert "\n" not in failure.message
        misfit = ""
        steps.evaluate(train, (0, 1, 2), (1,))


def wrong_attachments() -> None:
    def train(config: Any, trial: Any) -> None:
        for name, thing in (("number", 3), ("function", len), ("_generators", np.zeros(1))):
            text = error_from(StateError, lambda n=name, t=thing: trial.attach(**{n: t}))
            assert f"attach({name}=...)" in text
        trial.attach(one=np.zeros(1))
        assert "already" in error_from(StateError, lambda: trial.attach(one=np.zeros(1)))
        trial.attach(two=np.zeros(2))  # in a second call
        trial.report(trial.stop, loss=1.0)

    with course("gloo") as steps:
        steps.evaluate(train, (0, 1), ())
        kept = steps.keeper.get(TRIAL.id, 1)
        assert kept is None or set(kept.parts) == {"one", "two", "_generators"}
