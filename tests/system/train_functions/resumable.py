"""Training functions whose losses depend on the state that they are given back."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np


def log(trial, *words) -> None:
    """One line, appended at once, so that a kill loses nothing of it."""
    if trial.rank == 0:
        line = " ".join(map(str, (trial.id, trial.rung, *words))) + "\n"
        path = Path(trial.arguments["log"])
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def arrays(config, trial):
    assert "torch" not in sys.modules
    weights = np.full(4, float(config["x"]))
    trial.attach(weights=weights)
    for epoch in trial.epochs():
        time.sleep(trial.arguments["seconds"])
        weights *= 0.5  # exact, so that a mean over three ranks is, too
        weights += epoch
        loss = float(trial.mean(weights.sum())) + (7 * config["x"]) % 5
        log(trial, epoch, repr(loss))
        trial.report(epoch, loss=loss)


def stateless(config, trial):
    for epoch in trial.epochs():
        time.sleep(trial.arguments["seconds"])
        log(trial, epoch, "-")
        trial.report(epoch, loss=config["x"])


def model(config, trial):
    """Dropout and shuffled batches draw from torch's generator; Adam has a state of its own."""
    import torch

    torch.manual_seed(trial.seed)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=config["lr"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trial.attach(model=network, optimizer=optimizer, schedule=schedule)
    features = torch.linspace(-1, 1, 512).reshape(64, 8).sin()
    for epoch in trial.epochs():
        total = 0.0
        for batch in torch.randperm(64).split(16):
            loss = (network(features[batch]).squeeze(1) - features[batch].sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        schedule.step()
        time.sleep(trial.arguments["seconds"])
        log(trial, epoch, repr(total))
        trial.report(epoch, loss=total)
