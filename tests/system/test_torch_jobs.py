"""Whole jobs with torch: the examples that ship, and code that builds everything itself."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import yaml

from mpihpo import Results
from mpihpo.examples import digits
from tests.launch import MPIS, ROOT, Mpi, Result, run_ranks
from tests.system.experiments import Finished, run_experiment, without_ansi

EXAMPLES = importlib.resources.files("mpihpo.examples")
FASHION_MNIST = Path(
    os.environ.get("MPIHPO_FASHION_MNIST", ROOT.parent / "shared" / "data" / "fashion_mnist.h5")
)


def test_digits_on_four_ranks(mpi: Mpi, tmp_path: Path):
    arguments = ["-m", "mpihpo", "run", str(EXAMPLES / "digits.yaml"), "--output", "run"]
    is_second = mpi is not MPIS[0]
    if is_second:  # once in full is enough
        arguments += ["--set", "search.trials=4", "--set", "schedule.max_epochs=2"]
    result = run_ranks(mpi, 4, arguments, cwd=tmp_path, timeout=150)
    if is_second:
        check_digits(result, tmp_path, [(0, 0, 1, 4), (1, 1, 2, 2)], least=0.7)
    else:
        ladder = [(0, 0, 1, 16), (1, 1, 2, 8), (2, 2, 4, 4), (3, 4, 8, 2)]
        check_digits(result, tmp_path, ladder, least=0.97)


def check_digits(
    result: Result, folder: Path, planned: list[tuple[int, int, int, int]], least: float
) -> None:
    """The ladder has rung, start, stop and trials of each rung."""
    finished = Finished(result, folder / "run")
    results = finished.results
    ladder = results.ladder
    for column in ("planned", "evaluated"):
        columns = [ladder[name].tolist() for name in ("rung", "start", "stop", column)]
        assert list(zip(*columns, strict=True)) == planned
    assert ladder["failed"].sum() == 0
    # Ranks by the policy: doubled on each rung, up to the world.
    evaluations = results.evaluations
    widths = set(zip(evaluations["rung"].tolist(), evaluations["ranks"].tolist(), strict=True))
    assert widths == {(rung, min(2**rung, 4)) for rung, *_ in planned}

    assert results.best is not None
    assert results.best.objective >= least
    last, _, epochs, _ = planned[-1]
    assert (results.best.epochs, results.best.ranks) == (epochs, min(2**last, 4))
    assert results.reason == finished.journal[-1]["reason"] == "completed"
    assert accuracy_alone(results) == pytest.approx(results.best.objective, abs=1e-6)

    # One plain line for each outcome and rung, then the summary.
    lines = without_ansi(finished.output).splitlines()
    assert sum(" trial=" in line for line in lines) == sum(rung[3] for rung in planned)
    assert sum(" promoted=" in line for line in lines) == len(planned)
    assert finished.output.endswith(results.summary() + "\n")


@torch.no_grad()
def accuracy_alone(results: Results) -> float:
    """Of the checkpoint, on the validation set, without any job around it."""
    assert results.checkpoint is not None
    content: dict[str, Any] = torch.load(results.checkpoint, weights_only=True)
    config = content["config"]
    assert config == results.best.config
    model = digits.network(config["width"], config["layers"], config["dropout"])
    model.load_state_dict(content["state"]["model"])
    model.eval()
    images, labels = digits.load()[1].tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def test_fashion_mnist(tmp_path: Path):
    mpi = MPIS[0]  # what the second MPI does differently, digits shows
    if mpi.problem:
        pytest.skip(mpi.problem)
    if not FASHION_MNIST.is_file():
        pytest.skip(f"no {FASHION_MNIST}; MPIHPO_FASHION_MNIST names the file with the data")
    # A tenth of the samples: the tests' machine has two cores.
    few = tmp_path / "few.h5"
    with h5py.File(FASHION_MNIST, "r", locking=False) as whole, h5py.File(few, "w") as file:
        for name in ("train/images", "train/labels"):
            file[name] = whole[name][-14_000:]
    content = yaml.safe_load((EXAMPLES / "fashion_mnist.yaml").read_text())
    content["search"]["trials"] = 2
    content["search"]["space"] = {
        **content["search"]["space"],
        "width": {"choices": [8]},
        "lr": {"choices": [0.001, 0.003]},
    }
    content["schedule"]["max_epochs"] = 2
    content["process_group"] = "auto"
    finished = run_experiment(
        mpi,
        2,
        tmp_path,
        None,
        timeout=120,
        **{**content, "output": str(tmp_path / "run"), "arguments": {"data": str(few)}},
    )
    assert finished.results.best is not None
    assert finished.results.best.ranks == 2
    assert finished.results.best.objective > 0.6


def test_code_that_builds_everything_itself(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        2,
        tmp_path,
        "own_style:train",
        space={"workers": [1, 0]},
        schedule={"scheduler": "successive_halving", "max_epochs": 4},
        process_group="auto",
        timeout=120,
    )
    assert [failure for failure in finished.failures.values() if failure] == []
    assert {(o["rung"], len(o["ranks"])) for o in finished.outcomes} == {
        (0, 1),
        (1, 2),
        (2, 2),
    }
    assert finished.output
