"""A model whose training draws from torch's generator, with an optimizer that has a state."""

from __future__ import annotations

import time

import marks
import torch
from whole_jobs import suffer


def train(config, trial):
    marks.note(trial, "entered")
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
        marks.note(trial, "trained", epoch=epoch, loss=total)
        suffer(trial, epoch)
        trial.report(epoch, loss=total)
