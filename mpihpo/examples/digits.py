"""Handwritten digits: a small convolutional network on 1,797 real images of 8x8 pixels.

    mpiexec -n 4 python -m mpihpo run digits.yaml

The images are in ``digits.h5``, which states their source, licence and citation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from mpihpo import Trial

DATA = Path(__file__).with_name("digits.h5")


def train(config: Mapping[str, Any], trial: Trial) -> None:
    """Train one configuration up to the rung's last epoch; every rank of the trial runs this."""
    torch.manual_seed(trial.seed)  # before the model: all ranks start from the same weights
    # Kept in the process: this rank's next trials find the data already read.
    training, validation = trial.cache("digits", load)

    model = network(config["width"], config["layers"], config["dropout"]).to(trial.device)
    optimizer = make_optimizer(model, config, trial.lr_scale)
    # What is attached comes back here on the next rung, on whatever ranks the trial then has.
    trial.attach(model=model, optimizer=optimizer)
    parallel = trial.ddp(model)

    loader = trial.loader(training)
    for epoch in trial.epochs():
        model.train()
        for images, labels in loader:
            images, labels = images.to(trial.device), labels.to(trial.device)
            optimizer.zero_grad()
            functional.cross_entropy(parallel(images), labels).backward()
            optimizer.step()
        loss, accuracy = validate(model, validation, trial)
        trial.report(epoch, val_loss=loss, val_accuracy=accuracy)


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and validation set: images float32 (samples, 1, 8, 8) in [0, 1], labels int64."""
    # File locks fail on many parallel file systems, and nobody writes this file.
    with h5py.File(DATA, "r", locking=False) as file:
        return read(file["train"]), read(file["test"])


def read(group: h5py.Group) -> TensorDataset:
    """The samples of one group of the file."""
    images = torch.from_numpy(group["images"][:]).float().div(16).unsqueeze(1)
    return TensorDataset(images, torch.from_numpy(group["labels"][:]).long())


def network(width: int, layers: int, dropout: float) -> nn.Module:
    """``layers`` convolutions of ``width`` channels, then one linear layer to the ten digits."""
    modules: list[nn.Module] = []
    channels = 1
    for _ in range(layers):
        modules += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
        channels = width
    modules += [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(width * 16, 10)]
    return nn.Sequential(*modules)


def make_optimizer(
    model: nn.Module, config: Mapping[str, Any], lr_scale: float
) -> torch.optim.Optimizer:
    """The optimizer that the configuration asks for; ``momentum`` is there for SGD only."""
    lr = config["lr"] * lr_scale
    if config["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=config["momentum"])
    return torch.optim.Adam(model.parameters(), lr=lr)


@torch.no_grad()
def validate(model: nn.Module, data: TensorDataset, trial: Trial) -> tuple[float, float]:
    """Mean loss and accuracy over the whole set. Collective over the trial's ranks."""
    model.eval()
    # The model itself, not its DDP wrapper: shares differ in size, and nothing is to be reduced.
    images, labels = (part[trial.rank :: trial.world_size] for part in data.tensors)
    outputs: Tensor = model(images.to(trial.device))
    labels = labels.to(trial.device)
    loss = functional.cross_entropy(outputs, labels).item()
    accuracy = (outputs.argmax(1) == labels).float().mean().item()
    return trial.mean(loss, weight=len(labels)), trial.mean(accuracy, weight=len(labels))
