"""What a re-split costs: all ranks leave their groups and train on in groups of another size.

Started without a launcher it runs both parts, and prints how they compare:

    python benchmarks/bench_resplit.py [--resplits 200] [--state 10MB] [--restarts 5]

The first part is one job, `mpihpo.run` on 8 ranks, gloo: a small network under Adam, whose groups
fill the world with a size drawn from 1, 2, 4 and 8 for every re-split. It can be started alone with
``mpiexec -n 8 python benchmarks/bench_resplit.py``. Everything is timed where the runtime itself
calls it. The second part starts the same number of processes anew, up to their first all-reduce,
each with the state read from a file: the least that an implementation by restarting has to do.

The clocks of the ranks are compared with each other, so all of them must run on one node.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launcher
import machine

from mpihpo.records import Evaluation, Objective, Outcome, RungPlan, RungResult, Status, TrialRecord

if TYPE_CHECKING:
    from mpihpo import Trial
    from mpihpo.allocation import AllocationSettings
    from mpihpo.comm.interruptible import InterruptibleComm
    from mpihpo.schedule import Propose, ScheduleSettings

SIZES = (1, 2, 4, 8)
SEED = 17
LAYERS = 4
BATCH = 8
COMPARE_FROM_BYTES = 100_000_000

PARTS = {
    "keep": "copy the state to host memory, on the leaders",
    "teardown": "free the process group and the communicator",
    "others": "until the last rank has torn down",
    "decide": "outcome to the coordinator, its decision, order to the ranks",
    "communicator": "",
    "process group": "",
    "model": "the training function makes model and optimizer anew",
    "state": "hand-over and loading",
    "wrap": "DistributedDataParallel",
    "first step": "forward, backward, optimizer",
}


# What decides: every round is handed out when the one before is over.


def width_of(rung: int, world_size: int) -> int:
    """The size of all groups of a round."""
    sizes = [size for size in SIZES if world_size % size == 0]
    return random.Random(f"{SEED}:{rung}").choice(sizes)


class Rounds:
    """A scheduler: ``max_epochs`` rounds, in each as many trials as groups fill the world."""

    def __init__(
        self,
        *,
        settings: ScheduleSettings,
        objective: Objective,
        trials: int | None,
        propose: Propose,
    ) -> None:
        assert trials is not None
        self._rounds, self._world_size = settings.max_epochs, trials
        self._trials: list[TrialRecord] = []
        self._propose = propose
        self._epochs = [0] * trials
        self._rung = -1
        self._waiting: list[Evaluation] = []
        self._out: set[int] = set()

    @classmethod
    def ladder(cls, settings: ScheduleSettings, trials: int) -> tuple[RungPlan, ...]:
        """No ladder."""
        return ()

    @property
    def done(self) -> bool:
        """All rounds are over."""
        return self._rung + 1 == self._rounds and not self._waiting and not self._out

    def results(self) -> tuple[RungResult, ...]:
        """No rung is ever closed, so that nothing is dropped or written between the rounds."""
        return ()

    def status(self, trial_id: int) -> Status:
        """Parked between two rounds."""
        if self.done:
            return Status.COMPLETED
        return Status.RUNNING if trial_id in self._out else Status.PARKED

    def ask(self) -> Evaluation | None:
        """The next evaluation of this round, or the first of the next one."""
        if not self._waiting and not self._out and not self.done:
            self._rung += 1
            self._waiting = self._round()
        if not self._waiting:
            return None
        evaluation = self._waiting.pop(0)
        self._out.add(evaluation.trial.id)
        return evaluation

    def _round(self) -> list[Evaluation]:
        count = self._world_size // width_of(self._rung, self._world_size)
        while len(self._trials) < count:
            trial = self._propose()
            assert trial is not None
            self._trials.append(trial)
        starts = [self._epochs[trial.id] for trial in self._trials[:count]]
        return [
            Evaluation(trial=trial, rung=self._rung, start=start, stop=start + 1)
            for trial, start in zip(self._trials[:count], starts, strict=True)
        ]

    def tell(self, outcome: Outcome) -> None:
        """Count the epoch; a failure ends the benchmark."""
        if outcome.failure is not None:
            raise RuntimeError(outcome.failure.traceback)
        evaluation = outcome.allocation.evaluation
        self._out.remove(evaluation.trial.id)
        self._epochs[evaluation.trial.id] = evaluation.stop


class FillTheWorld:
    """An allocation policy: the round's width for all."""

    def __init__(
        self, *, settings: AllocationSettings, reduction_factor: int, world_size: int
    ) -> None:
        self._world_size = world_size

    def width(self, evaluation: Evaluation) -> int:
        """The width of the evaluation's round."""
        return width_of(evaluation.rung, self._world_size)

    def share(self, evaluations: list[Evaluation], free: int) -> list[int]:
        """The same."""
        return [self.width(evaluation) for evaluation in evaluations]


# What trains and is timed.


class Trace:
    """When this rank entered and left what, by evaluation."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, tuple[float, float]]] = []

    def time(self, owner: Any, name: str, key: str, *, opens: bool = False) -> None:
        """Time every call of ``owner.name``; with ``opens`` it begins an evaluation."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            if opens:
                self.evaluations.append({})
            try:
                return function(*args, **kwargs)
            finally:
                self.evaluations[-1][key] = (began, time.perf_counter())

        setattr(owner, name, timed)

    def note(self, key: str, began: float) -> float:
        """Note what began at ``began`` and ends now."""
        now = time.perf_counter()
        self.evaluations[-1][key] = (began, now)
        return now


trace = Trace()
meeting: InterruptibleComm | None = None


def make_model(state_bytes: int) -> tuple[Any, Any]:
    """A network and its Adam, which together hold about ``state_bytes`` of state."""
    import torch

    # Parameters and two moments of each, of 4 bytes.
    width = round((state_bytes / 12 / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def step(model: Any, optimizer: Any, width: int) -> float:
    """One optimizer step on random numbers."""
    import torch

    optimizer.zero_grad()
    loss = model(torch.randn(BATCH, width)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train(config: Mapping[str, Any], trial: Trial) -> None:
    """Two steps; all ranks meet after the second one, so that they re-split at once."""
    assert meeting is not None
    began = time.perf_counter()
    model, optimizer = make_model(trial.arguments["state_bytes"])
    width = model[0].in_features
    now = trace.note("model", began)
    trial.attach(model=model, optimizer=optimizer)
    now = trace.note("attach", now)
    wrapped = trial.ddp(model)
    now = trace.note("wrap", now)
    for epoch in trial.epochs():
        loss = step(wrapped, optimizer, width)
        trace.note("first step", now)
        if trial.arguments["compare"] and trial.world_size > 1:
            _plain_broadcast(trial, 3 * sum(each.nbytes for each in model.parameters()))
        now = time.perf_counter()
        step(wrapped, optimizer, width)
        trace.note("second step", now)
        meeting.Barrier()
        trial.report(epoch, loss=loss)
        trace.note("last step", time.perf_counter())


def _plain_broadcast(trial: Trial, nbytes: int) -> None:
    import torch
    import torch.distributed as dist

    buffer = trial.cache("buffer", lambda: torch.ones(nbytes // 4))
    trial.mean(0.0)  # all members are here
    began = time.perf_counter()
    dist.broadcast(buffer, 0)
    trace.note("plain", began)


def job(options: argparse.Namespace) -> None:
    """Part one, on a rank; rank 0 prints."""
    global meeting
    from mpi4py import MPI

    import mpihpo
    from mpihpo.comm.group import Group
    from mpihpo.comm.interruptible import InterruptibleComm
    from mpihpo.runner import trial as trial_module

    comm = MPI.COMM_WORLD
    if comm.rank == 0 and not options.json:
        print(machine.header("What a re-split costs"))
    meeting = InterruptibleComm(comm.Dup())
    trace.time(Group, "build", "build", opens=True)
    trace.time(Group, "_make_comm", "communicator")
    trace.time(Group, "free", "free")
    trace.time(trial_module, "broadcast_parts", "broadcast")
    state_bytes = parse_bytes(options.state)
    experiment = {
        "objective": {"metric": "loss"},
        "seed": SEED,
        "search": {"trials": comm.size, "space": {"x": {"lower": 0.0, "upper": 1.0}}},
        "schedule": {"scheduler": "__main__:Rounds", "max_epochs": options.resplits + 1},
        "allocation": {"policy": "__main__:FillTheWorld"},
        "process_group": "gloo",
        "arguments": {"state_bytes": state_bytes, "compare": state_bytes >= COMPARE_FROM_BYTES},
    }
    mpihpo.run(experiment, train)
    traces = comm.gather(trace.evaluations, 0)
    meeting.Free()
    if comm.rank != 0 or traces is None:
        return
    assert {len(each) for each in traces} == {options.resplits + 1}
    lines, median = summarise(traces, comm.size, state_bytes)
    text = "\n".join([f"{machine.mpi_library()}, {comm.size} ranks", *lines])
    if options.json:
        found = {"package": machine.package(), "text": text, "median": median}
        Path(options.json).write_text(json.dumps(found))
        if options.state_file:
            write_state(options.state_file, state_bytes)
    else:
        print(text)


def parts_of(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]], all_free: float
) -> dict[str, float]:
    """Seconds of each part of one re-split on one rank; they add up to the whole."""
    left = before["last step"][1]
    freeing, freed = before["free"]
    building, built = after["build"]
    communicator = after.get("communicator", (0.0, 0.0))
    entered, made = after["model"]
    parts = {
        "keep": freeing - left,
        "teardown": freed - freeing,
        "others": all_free - freed,
        "decide": building - all_free,
        "communicator": communicator[1] - communicator[0],
        "process group": built - building - (communicator[1] - communicator[0]),
        "model": made - entered,
        "state": (entered - built) + (after["attach"][1] - after["attach"][0]),
        "wrap": after["wrap"][1] - after["wrap"][0],
        "first step": after["first step"][1] - after["first step"][0],
    }
    parts["whole"] = sum(parts.values())
    return parts


def summarise(
    traces: list[list[dict[str, tuple[float, float]]]], ranks: int, state_bytes: int
) -> tuple[list[str], float]:
    """The table as lines, and the median of the whole in seconds; the slowest rank counts."""
    worst: list[dict[str, float]] = []
    for k in range(len(traces[0]) - 1):
        all_free = max(each[k]["free"][1] for each in traces)
        each_rank = [parts_of(each[k], each[k + 1], all_free) for each in traces]
        worst.append({part: max(each[part] for each in each_rank) for part in each_rank[0]})
    widths = [width_of(k + 1, ranks) for k in range(len(worst))]
    lines = [
        f"{len(worst)} re-splits among groups of {', '.join(map(str, sorted(set(widths))))}, "
        f"gloo, {state_bytes / 1e6:g} MB of model and Adam state; the slowest rank of each, in ms",
        f"  {'':14} {'median':>8} {'maximum':>8}",
    ]
    for part in (*PARTS, "whole"):
        values = [each[part] for each in worst]
        lines.append(
            f"  {part:14} {milliseconds(values)} {1e3 * max(values):8.1f}  {PARTS.get(part, '')}"
        )
    seconds = [
        max(each[k + 1]["second step"][1] - each[k + 1]["second step"][0] for each in traces)
        for k in range(len(worst))
    ]
    lines.append(
        f"  {'second step':14} {milliseconds(seconds)} {1e3 * max(seconds):8.1f}  "
        f"not part of the re-split; all {ranks} ranks are in one at once"
    )
    lines.append("by the size of the new groups, the whole")
    for width in sorted(set(widths)):
        values = [each["whole"] for each, size in zip(worst, widths, strict=True) if size == width]
        lines.append(f"  {width:14} {milliseconds(values)} {1e3 * max(values):8.1f}")
    lines += bandwidths(traces, widths, state_bytes)
    return lines, statistics.median(each["whole"] for each in worst)


def bandwidths(
    traces: list[list[dict[str, tuple[float, float]]]], widths: list[int], state_bytes: int
) -> Iterable[str]:
    """Lines that compare the hand-over with a plain broadcast of as many bytes."""
    if state_bytes < COMPARE_FROM_BYTES:
        return
    yield "hand-over within a group, MB/s: as it is, with loading, plain dist.broadcast; and ratio"
    for width in sorted({*widths} - {1}):
        rounds = [k + 1 for k, size in enumerate(widths) if size == width]
        rates = []
        for key in ("broadcast", "attach", "plain"):
            seconds = [max(e[k][key][1] - e[k][key][0] for e in traces) for k in rounds]
            rates.append(state_bytes / 1e6 / statistics.median(seconds))
        shown = " ".join(f"{rate:8.0f}" for rate in rates)
        yield f"  {width:14} {shown} {rates[0] / rates[2]:8.2f}"


def milliseconds(values: list[float]) -> str:
    """The median."""
    return f"{1e3 * statistics.median(values):8.1f}"


# Part two: the least that restarting takes.


def write_state(path: str, state_bytes: int) -> None:
    """The same state, as a file."""
    import torch

    model, optimizer = make_model(state_bytes)
    step(model, optimizer, model[0].in_features)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def restarted(options: argparse.Namespace) -> None:
    """A rank that was started anew: from the interpreter to the first all-reduce."""
    import torch
    import torch.distributed as dist

    rank = _from_environment("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    address = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options.ranks)
    model, optimizer = make_model(parse_bytes(options.state))
    state = torch.load(options.state_file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    dist.all_reduce(torch.ones(1))
    sys.stdout.write(f"{time.time()}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def _from_environment(*names: str) -> int:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit(f"none of {', '.join(names)} is set; start this with mpiexec")


def restart_seconds(options: argparse.Namespace, state_file: str) -> float:
    """From the start of the launcher until the last rank has its first all-reduce."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [__file__, "--restarted", "--port", str(port), "--ranks", str(options.ranks)]
    arguments += ["--state", options.state, "--state-file", state_file]
    began = time.time()
    text, _ = launcher.launch(
        options.ranks,
        arguments,
        python=options.python,
        # gloo would ask the resolver for the host's address, which can take seconds.
        environment={"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"},
    )
    ends = [float(line) for line in text.split()]
    assert len(ends) == options.ranks, text
    return max(ends) - began


# The driver.


def drive(options: argparse.Namespace) -> None:
    """Both parts, and how they compare."""
    print(machine.header("What a re-split costs"))
    with tempfile.TemporaryDirectory() as folder:
        state_file = f"{folder}/state.pt"
        found = launch_job(
            options.python,
            options.ranks,
            options.resplits,
            state=options.state,
            state_file=state_file,
        )
        print(found["text"], flush=True)
        if not options.restarts:
            return
        seconds = [restart_seconds(options, state_file) for _ in range(options.restarts)]
    median = statistics.median(seconds)
    print(
        f"restarting {options.ranks} processes up to their first all-reduce, state read from a "
        f"file, {options.restarts} times\n"
        f"  {'whole':14} {1e3 * median:8.1f} {1e3 * max(seconds):8.1f}\n"
        f"a re-split is {median / found['median']:.1f} times as fast as restarting"
    )


def launch_job(
    python: str,
    ranks: int,
    resplits: int,
    *,
    state: str,
    state_file: str | None = None,
    root: Path = launcher.ROOT,
) -> dict[str, Any]:
    """Part one as a job of its own, with the package in ``root``.

    Returns:
        ``text``, the table; ``median``, the seconds of a whole re-split; ``package``, its folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        arguments = [__file__, "--json", str(found), "--resplits", str(resplits), "--state", state]
        if state_file:
            arguments += ["--state-file", state_file]
        launcher.launch(ranks, arguments, python=python, root=root)
        content: dict[str, Any] = json.loads(found.read_text())
    return content


def parse_bytes(text: str) -> int:
    """Bytes of ``10MB``, ``300 MB``, ``2GB``: decimal units."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text.strip())
    if match is None:
        raise SystemExit(f"--state {text!r} is not possible; expected a size such as 10MB")
    return int(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])


def main() -> None:
    """Read the arguments; drive, or be one rank of either part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--resplits", type=int, default=200)
    parser.add_argument("--state", default="10MB", help="model and optimizer, default 10MB")
    parser.add_argument("--restarts", type=int, default=5, help="0: without this part")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--python", default=sys.executable, help="the Python of the ranks")
    parser.add_argument("--json", help=argparse.SUPPRESS)
    parser.add_argument("--state-file", help=argparse.SUPPRESS)
    parser.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    act: Callable[[argparse.Namespace], None] = drive
    if options.restarted:
        act = restarted
    elif launcher.is_launched():
        act = job
    act(options)


if __name__ == "__main__":
    main()
