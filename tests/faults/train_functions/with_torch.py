"""Faults of a training function that uses torch, as its case says."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from faulty import Chosen, Unsaveable
from marks import note


class FailingLayer(torch.autograd.Function):
    @staticmethod
    def forward(context, values, fails):
        context.fails = fails
        fails("in forward")
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        context.fails("in backward")
        context.fails("out of memory", torch.OutOfMemoryError("CUDA out of memory."))
        return gradient, None


class FailingData(torch.utils.data.Dataset):
    def __init__(self, fails) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        if index >= 12:
            self.fails("in a loader's worker")
        return torch.full((4,), float(index))


class FailingMetric:
    def __init__(self, fails) -> None:
        self.fails = fails

    def __float__(self) -> float:
        self.fails("in a metric")
        return 1.0


def train(config, trial):
    note(trial, "entered")
    case = trial.arguments["cases"][config["case"]]
    where = case.get("where", "nowhere")

    def fails(here: str, error: BaseException | None = None) -> None:
        if where == here and trial.rank == case["position"]:
            note(trial, "fault")
            raise error or Chosen(here)

    fails("before the first collective")
    torch.manual_seed(trial.seed)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    extra = Unsaveable(fails)
    trial.attach(model=model, optimizer=optimizer, extra=extra)
    parallel = trial.ddp(model)
    in_worker = where == "in a loader's worker"
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if in_worker else {}
    data = trial.loader(FailingData(fails), **workers)
    for epoch in trial.epochs():
        for batch in data:
            optimizer.zero_grad()
            FailingLayer.apply(parallel(batch), fails).square().mean().backward()
            optimizer.step()
        if where == "sys.exit" and trial.rank == case["position"]:
            note(trial, "fault")
            sys.exit(3)
        if where == "other collectives":
            differ(trial, case)
        trial.report(epoch, loss=FailingMetric(fails))
    extra.is_trained = True
    fails("after the loop")


def differ(trial, case):
    """One rank calls another collective of the process group than the others."""
    if trial.rank == case["position"]:
        note(trial, "fault")
    is_other = trial.rank == case["position"]
    if case["what"] == "another collective":
        if is_other:
            dist.broadcast(torch.zeros(5), case["position"])
            dist.barrier()
        else:
            dist.all_reduce(torch.zeros(5))
    elif case["what"] == "another shape":
        dist.all_reduce(torch.zeros(7 if is_other else 5))
    elif is_other:
        assert case["what"] == "one more"
        dist.all_reduce(torch.zeros(5))
