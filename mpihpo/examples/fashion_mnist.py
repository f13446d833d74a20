"""Fashion-MNIST: a convolutional network on 70,000 images of 28x28 pixels from an HDF5 file.

    srun python -m mpihpo run fashion_mnist.yaml --set arguments.data=/path/to/fashion_mnist.h5

The file has ``train/images`` and ``test/images``, uint8 (samples, 28, 28), and ``train/labels`` and
``test/labels``, uint8 (samples,). The last 10,000 training images are the validation set; the test
images stay unseen, for the one model that is chosen in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from mpihpo import Trial

HELD_OUT = 10_000
VALIDATION_BATCH = 1000


def train(config: Mapping[str, Any], trial: Trial) -> None:
    """Train one configuration up to the rung's last epoch; every rank of the trial runs this."""
    torch.manual_seed(trial.seed)
    path = data_path(trial.arguments)
    # Keyed by the path and kept in the process: the file is read once per rank, not per trial.
    training, validation = trial.cache(f"fashion_mnist {path}", partial(load, path))

    model = network(config["width"], config["dropout"]).to(trial.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config["lr"] * trial.lr_scale, weight_decay=config["weight_decay"]
    )
    trial.attach(model=model, optimizer=optimizer)
    parallel = trial.ddp(model)

    loader = trial.loader(training)
    for epoch in trial.epochs():
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = parallel(scaled(images, trial.device))
            functional.cross_entropy(outputs, labels.to(trial.device)).backward()
            optimizer.step()
        loss, accuracy = validate(model, validation, trial)
        trial.report(epoch, val_loss=loss, val_accuracy=accuracy)


def data_path(arguments: Mapping[str, Any]) -> Path:
    """Where the data are, from the experiment's ``arguments.data``.

    Raises:
        ValueError: ``arguments.data`` is not set.
        FileNotFoundError: There is no such file.
    """
    if "data" not in arguments:
        raise ValueError("arguments.data: not set; give the path of the Fashion-MNIST HDF5 file")
    path = Path(arguments["data"])
    if not path.is_file():
        raise FileNotFoundError(
            f"arguments.data: no file {str(path)!r}; give the path of the Fashion-MNIST HDF5 file"
        )
    return path


def load(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """Training and validation set: images uint8 (samples, 1, 28, 28), labels int64."""
    # File locks fail on many parallel file systems, and nobody writes this file.
    with h5py.File(path, "r", locking=False) as file:
        images = torch.from_numpy(file["train/images"][:]).unsqueeze(1)
        labels = torch.from_numpy(file["train/labels"][:]).long()
    return (
        TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT]),
        TensorDataset(images[-HELD_OUT:], labels[-HELD_OUT:]),
    )


def scaled(images: Tensor, device: torch.device) -> Tensor:
    """Images as float32 in [0, 1] on the device: bytes travel, floats are made there."""
    return images.to(device).float().div(255)


def network(width: int, dropout: float) -> nn.Module:
    """Two convolutions of ``width`` and twice ``width`` channels, then two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 49, 128),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def validate(model: nn.Module, data: TensorDataset, trial: Trial) -> tuple[float, float]:
    """Mean loss and accuracy over the whole set. Collective over the trial's ranks."""
    model.eval()
    images, labels = (part[trial.rank :: trial.world_size] for part in data.tensors)
    loss = correct = 0.0
    for some, answers in zip(
        images.split(VALIDATION_BATCH), labels.split(VALIDATION_BATCH), strict=True
    ):
        outputs = model(scaled(some, trial.device))
        answers = answers.to(trial.device)
        loss += functional.cross_entropy(outputs, answers, reduction="sum").item()
        correct += (outputs.argmax(1) == answers).sum().item()
    # Shares differ by a sample when the ranks do not divide the set, hence the weights.
    return (
        trial.mean(loss / len(labels), weight=len(labels)),
        trial.mean(correct / len(labels), weight=len(labels)),
    )
