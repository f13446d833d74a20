"""Training functions of check_gpu.py; each checks what it is given and fails its trial if wrong."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpihpo import Trial
from mpihpo.examples import digits as example


def digits(config: Mapping[str, Any], trial: Trial) -> None:
    check_device(trial)
    example.train(config, trial)


def stuck(config: Mapping[str, Any], trial: Trial) -> None:
    check_device(trial)
    folder = Path(trial.arguments["folder"])
    tensor = torch.ones(1000, device=trial.device)
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 1000 * trial.world_size
    if trial.id == 0:
        try:
            if trial.rank == 2:
                time.sleep(0.5)  # the others are in their all-reduce by then
                raise ValueError("this rank fails on purpose")
            dist.all_reduce(tensor)
            tensor.sum().item()
        except ValueError:
            (folder / "failed").write_text(repr(time.time()))
            raise
        except BaseException:
            (folder / f"released-{trial.rank}").write_text(repr(time.time()))
            raise
    for epoch in trial.epochs():
        trial.report(epoch, loss=trial.mean(config["x"]))


def handover(config: Mapping[str, Any], trial: Trial) -> None:
    check_device(trial)
    folder = Path(trial.arguments["folder"])
    torch.manual_seed(trial.seed + trial.rank)  # ranks differ until the state is shared
    # One leaf is larger than what is packed with others.
    model = nn.Sequential(nn.Linear(64, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 8))
    model.to(trial.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    trial.attach(model=model, optimizer=optimizer)
    if trial.start > 0:
        check_restored(trial, model, optimizer, folder)
    parallel = trial.ddp(model, broadcast_buffers=False)
    for epoch in trial.epochs():
        inputs = torch.randn(16, 64, device=trial.device)
        optimizer.zero_grad()
        loss = parallel(inputs).square().mean()
        loss.backward()
        optimizer.step()
        trial.report(epoch, loss=trial.mean(loss))
    if trial.rank == 0:
        kept(trial, folder, trial.stop).write_text(str(fingerprint(model, optimizer)))


def check_restored(
    trial: Trial, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> None:
    expected = int(kept(trial, folder, trial.start).read_text())
    found = trial.comm.allgather(fingerprint(model, optimizer))
    assert found == [expected] * trial.world_size, f"kept {expected}, restored {found}"
    for parameter in model.parameters():
        assert parameter.device == trial.device
        assert optimizer.state[parameter]["exp_avg"].device == trial.device
        assert optimizer.state[parameter]["step"].item() == trial.start
    (folder / f"restored-{trial.id}-{trial.rung}-{trial.rank}").touch()


def kept(trial: Trial, folder: Path, epoch: int) -> Path:
    return folder / f"kept-{trial.id}-{epoch}"


def fingerprint(*things: Any) -> int:
    """Over the bytes of every tensor, wherever it lies, and the text of everything else."""
    crc = 0

    def add(value: Any) -> None:
        nonlocal crc
        if isinstance(value, torch.Tensor):
            crc = zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes(), crc)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                crc = zlib.crc32(repr(key).encode(), crc)
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            crc = zlib.crc32(repr(value).encode(), crc)

    for thing in things:
        add(thing.state_dict())
    return crc


def check_device(trial: Trial) -> None:
    assert trial.device.type == trial.arguments["device"], f"given {trial.device}"
