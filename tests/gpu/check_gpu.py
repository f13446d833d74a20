"""What only a GPU can show, on one GPU, in under 5 minutes: ``python tests/gpu/check_gpu.py``.

Prints its figures as lines ``name value unit`` and ends with status 0 if all is well. ``--cpu``
runs what needs no NCCL on the CPU instead, to test the program itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mpihpo.results.reader import Results  # noqa: E402 - after the path is set
from mpihpo.yaml_file import write_yaml  # noqa: E402
from tests.launch import MPIS, Result, run_ranks  # noqa: E402

TRAINED = Path(__file__).with_name("trained.py")
NCCL_GROUPS = Path(__file__).with_name("nccl_groups.py")
DIGITS = ROOT / "mpihpo" / "examples" / "digits.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="on the CPU, without NCCL")
    parser.add_argument("--only", choices=CHECKS, help="one of the checks")
    given = parser.parse_args()
    names = [given.only] if given.only else list(CHECKS)
    if given.cpu:
        names = [name for name in names if name != "nccl_groups"]
    failed = []
    began = time.monotonic()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="mpihpo-gpu-") as folder:
            try:
                CHECKS[name](Path(folder), "cpu" if given.cpu else "cuda")
            except Exception:  # the checks after it are worth a figure too
                failed.append(name)
                sys.stderr.write(f"{name} failed:\n{traceback.format_exc()}")
    figure("whole_check", time.monotonic() - began, "s")
    figure("failed_checks", len(failed), "count")
    return 1 if failed else 0


def figure(name: str, value: float, unit: str) -> None:
    sys.stdout.write(f"{name} {value:.6g} {unit}\n")
    sys.stdout.flush()


def ranks(count: int, arguments: list[str], device: str) -> Result:
    mpi = MPIS[0]
    assert not mpi.problem, mpi.problem
    env: dict[str, str | None] = {"GLOO_SOCKET_IFNAME": None}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    return run_ranks(mpi, count, arguments, timeout=150, env=env)


def experiment(folder: Path, device: str, function: str, **sections: Any) -> Path:
    """Writes an experiment of gloo groups that trains a function of trained.py."""
    mapping = {
        "train": f"{TRAINED}:{function}",
        "objective": {"metric": "loss"},
        "process_group": "gloo",
        "arguments": {"device": device, "folder": str(folder)},
        **sections,
    }
    path = folder / "experiment.yaml"
    path.write_text(write_yaml(mapping))
    return path


# The checks.


def nccl_groups(folder: Path, device: str) -> None:
    """Groups of one rank, built and destroyed, and one aborted, by a program of its own."""
    sys.stdout.write(ranks(1, [str(NCCL_GROUPS)], device).stdout)


def digits(folder: Path, device: str) -> None:
    """The digits experiment by ranks that share the device."""
    for count in (2, 4):
        output = folder / f"digits-{count}"
        changes = {
            "train": f"{TRAINED}:digits",
            "process_group": "gloo",
            "arguments.device": device,
            # All of it on GPUs; on a few cores of a CPU the program is what is tested.
            "search.trials": 16 if device == "cuda" else 4,
        }
        sets = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
        arguments = ["-m", "mpihpo", "run", str(DIGITS), "--quiet", "--output", str(output), *sets]
        result = ranks(count, arguments, device)
        best = Results(output).best
        assert best is not None
        figure(f"digits_{count}_ranks", result.seconds, "s")
        figure(f"digits_{count}_ranks_accuracy", best.objective, "fraction")
        assert best.objective > 0.95, best
        widest = max(evaluation["ranks"] for evaluation in Results(output).evaluations)
        assert widest == count, f"no trial had all {count} ranks"


def stuck(folder: Path, device: str) -> None:
    """One rank fails while the others are in an all-reduce; the next trial has the same ranks."""
    path = experiment(
        folder,
        device,
        "stuck",
        search={"trials": 2, "space": {"x": {"lower": 0.0, "upper": 1.0}}},
        schedule={"scheduler": "none", "max_epochs": 1},
        allocation={"policy": "fixed", "ranks": 4},
    )
    output = folder / "run"
    ranks(4, ["-m", "mpihpo", "run", str(path), "--quiet", "--output", str(output)], device)
    statuses = {trial["id"]: trial["status"] for trial in Results(output).trials}
    assert statuses == {0: "failed", 1: "completed"}, statuses
    failed_at = float((folder / "failed").read_text())
    released = [float(file.read_text()) for file in folder.glob("released-*")]
    assert len(released) == 3, f"{len(released)} of 3 ranks fell out of their all-reduce"
    longest = max(released) - failed_at
    figure("stuck_ranks_released", longest, "s")
    assert longest < 10


def handover(folder: Path, device: str) -> None:
    """Model and Adam of the device, from one rank to two to four, checked by fingerprints."""
    path = experiment(
        folder,
        device,
        "handover",
        search={"trials": 4, "space": {"lr": {"lower": 1e-3, "upper": 1e-2}}},
        schedule={"scheduler": "successive_halving", "min_epochs": 1, "max_epochs": 4},
        allocation={"policy": "doubling", "ranks": 1},
    )
    output = folder / "run"
    ranks(4, ["-m", "mpihpo", "run", str(path), "--quiet", "--output", str(output)], device)
    results = Results(output)
    statuses = {trial["id"]: trial["status"] for trial in results.trials}
    assert "failed" not in statuses.values(), [trial["error"] for trial in results.trials]
    widths = sorted(e["ranks"] for e in results.evaluations if e["start"] > 0)
    restored = len(list(folder.glob("restored-*")))
    assert widths == [2, 2, 4], widths
    assert restored == sum(widths), f"{restored} of {sum(widths)} ranks compared fingerprints"
    figure("handover_ranks_compared", restored, "count")
    seconds = max(float(e["restore"]) for e in results.evaluations)
    figure("handover_longest_restore", seconds, "s")


CHECKS: dict[str, Callable[[Path, str], None]] = {
    "nccl_groups": nccl_groups,
    "digits": digits,
    "stuck": stuck,
    "handover": handover,
}

if __name__ == "__main__":
    sys.exit(main())
