"""Whole jobs with torch and gloo, through ``mpihpo.run``."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.utils.data import Dataset

import mpihpo
from tests.mpi.programs.jobs import experiment as without_torch
from tests.mpi.programs.jobs import few, finished
from tests.mpi.programs.jobs import loss as made_up_loss

WORLD = MPI.COMM_WORLD


def experiment(**changes: Any) -> dict[str, Any]:
    return without_torch(process_group="gloo", **changes)


class Numbers(Dataset[int]):
    """The numbers below 23."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return range(23)[index]


def shares() -> None:
    """Each sample once per epoch, in the same steps, for any number of ranks."""
    steps: dict[int, list[list[set[int]]]] = {}

    def loading(config: dict[str, Any], trial: Any) -> None:
        loader = trial.loader(Numbers())
        ordered = trial.loader(Numbers(), shuffle=False)
        epochs = []
        for epoch in trial.epochs():
            mine = [batch.tolist() for batch in loader]
            assert all(mine), "a rank had a step without samples"
            assert len(mine) == len(loader)
            everybody = trial.comm.allgather(mine)
            assert len({len(each) for each in everybody}) == 1, "ranks with fewer steps"
            seen = [number for each in everybody for batch in each for number in batch]
            assert sorted(seen) == list(range(23)), "a sample was missed or seen twice"
            together = zip(*everybody, strict=True)
            epochs.append([{n for batch in step for n in batch} for step in together])
            first = trial.comm.allgather(next(iter(ordered)).tolist())
            assert sorted(number for batch in first for number in batch) == list(range(10))
            trial.report(epoch, loss=1.0)
        assert epochs[0] != epochs[1], "two epochs in the same order"
        steps[trial.world_size] = epochs

    for ranks in range(1, WORLD.size + 1):
        changed = experiment(
            allocation={"policy": "fixed", "ranks": ranks},
            search=few(1),
            schedule={"scheduler": "none", "max_epochs": 2},
            batch={"size": 10},
        )
        finished(mpihpo.run(changed, loading))
    everywhere: dict[int, list[list[set[int]]]] = {}
    for each in WORLD.allgather(steps):
        everywhere |= each
    assert sorted(everywhere) == list(range(1, WORLD.size + 1))
    for ranks, epochs in everywhere.items():
        # Three samples in the last batch; more ranks than that, and it joins the one before.
        assert [len(step) for step in epochs[0]] == ([10, 10, 3] if ranks <= 3 else [10, 13])
        if ranks <= 3:
            assert epochs == everywhere[1], f"other samples in a step on {ranks} ranks"


def one_rank_trials() -> None:
    """They have a default group of one, without traffic, and no communicator unless they ask."""

    def training(config: dict[str, Any], trial: Any) -> None:
        assert trial.world_size == 1
        model = torch.nn.Linear(2, 2)
        trial.attach(model=model)
        assert trial.ddp(model) is model
        for epoch in trial.epochs():
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 1
            trial.report(epoch, loss=trial.mean(made_up_loss(config, epoch)))
        [live] = trial._group.world.registry.live
        assert live.startswith("process group")

    finished(mpihpo.run(experiment(allocation={"policy": "fixed", "ranks": 1}), training))


def resized_trials() -> None:
    """DDP on 1, 2, ... ranks in one job; the default group is always the trial's."""
    sizes: set[int] = set()
    excepthook = sys.excepthook

    def training(config: dict[str, Any], trial: Any) -> None:
        torch.manual_seed(trial.seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        trial.attach(model=model, optimizer=optimizer)
        ddp = trial.ddp(model)
        sizes.add(trial.world_size)
        assert (dist.get_rank(), dist.get_world_size()) == (trial.rank, trial.world_size)
        for epoch in trial.epochs():
            optimizer.zero_grad()
            ddp(torch.full((4, 3), float(epoch + trial.rank))).pow(2).mean().backward()
            optimizer.step()
            weights = trial.comm.allgather(model[0].weight.detach().numpy().tobytes())
            assert len(set(weights)) == 1, "the ranks' models went apart"
            trial.report(epoch, loss=trial.mean(made_up_loss(config, epoch)))

    results = finished(mpihpo.run(experiment(), training))
    everywhere = set().union(*WORLD.allgather(sizes))
    assert {1, WORLD.size} <= everywhere
    assert results.best is not None
    assert not dist.is_initialized()
    assert sys.excepthook is excepthook


def failing_members() -> None:
    """A rank of a trial fails while the others are in a collective of torch or in backward."""

    def failing(config: dict[str, Any], trial: Any) -> None:
        ddp = trial.ddp(torch.nn.Linear(2, 1))
        for epoch in trial.epochs():
            out = ddp(torch.ones(1, 2)).sum()
            if trial.id in (1, 4) and trial.rank == 1:
                raise ArithmeticError(f"on purpose in trial {trial.id}")
            if trial.id == 4:
                dist.barrier()
            out.backward()
            trial.report(epoch, loss=trial.mean(made_up_loss(config, epoch)))

    began = time.monotonic()
    settings = {"policy": "fixed", "ranks": 2}
    results = mpihpo.run(experiment(allocation=settings, search=few(6)), failing)
    assert time.monotonic() - began < 60
    failed = results.trials[results.trials["status"] == "failed"]
    assert sorted(failed["id"]) == [1, 4]
    for row in failed:
        assert f"ArithmeticError: on purpose in trial {row['id']}" in row["error"]
    assert results.best is not None
    assert not dist.is_initialized()


def left_behind() -> None:
    """Work that nobody waited for, a default device, type and group: no later trial meets them."""

    def untidy(config: dict[str, Any], trial: Any) -> None:
        assert torch.get_default_dtype() == torch.float32
        assert torch.ones(1).device.type == "cpu"
        model = torch.nn.Linear(2, 1)
        trial.attach(model=model)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        for epoch in trial.epochs():
            dist.all_reduce(torch.ones(1000, device="cpu"), async_op=True)
            trial.report(epoch, loss=made_up_loss(config, epoch))
        if trial.id % 2:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    results = finished(mpihpo.run(experiment(), untidy))
    assert set(results.trials["status"]) <= {"completed", "stopped"}
    assert not dist.is_initialized()
