"""Fails in the way and on the rank of the group that the configuration names; uses torch."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


class Chosen(Exception):
    pass


class Unsaveable:
    """Has a state that can be shared at first and not be kept in the end."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.is_trained = False

    def state_dict(self):
        if self.fails and self.is_trained:
            raise Chosen("in state_dict")
        return {"weight": torch.zeros(3)}

    def load_state_dict(self, state) -> None:
        assert state["weight"].shape == (3,)


class FailingLayer(torch.autograd.Function):
    @staticmethod
    def forward(context, values, fails_forward, error):
        context.error = error
        if fails_forward:
            raise Chosen("in forward")
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        if context.error is not None:
            raise context.error
        return gradient, None, None


class FailingData(torch.utils.data.Dataset):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        if self.fails and index >= 12:
            raise Chosen("in a loader's worker")
        return torch.full((4,), float(index))


def train(config, trial):
    kind = config["failure"]
    chosen = trial.rank == min(config.get("position", 0), trial.world_size - 1)

    def fails(*kinds: str) -> bool:
        return chosen and kind in kinds

    if fails("before the first collective"):
        raise Chosen("before the first collective")
    torch.manual_seed(trial.seed)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    extra = Unsaveable(fails("in state_dict"))
    trial.attach(model=model, optimizer=optimizer, extra=extra)
    parallel = trial.ddp(model)
    if fails("out of memory"):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    else:
        error = Chosen("in backward") if fails("in backward") else None
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "in a loader" else {}
    data = trial.loader(FailingData(fails("in a loader")), **workers)
    for epoch in trial.epochs():
        for batch in data:
            optimizer.zero_grad()
            output = FailingLayer.apply(parallel(batch), fails("in forward"), error)
            output.square().mean().backward()
            optimizer.step()
        if fails("in a metric"):
            trial.report(epoch, loss=FailingMetric())
        if fails("exits"):
            sys.exit(3)
        if fails("is interrupted"):
            raise KeyboardInterrupt
        if fails("in a collective of another shape"):
            dist.all_reduce(torch.zeros(5))
        trial.report(epoch, loss=1.0 + trial.id / 1000)
    extra.is_trained = True
    if fails("after the loop"):
        raise Chosen("after the loop")


class FailingMetric:
    def __float__(self) -> float:
        raise Chosen("in a metric")
