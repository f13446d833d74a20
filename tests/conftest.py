"""What all tests share: the header line, and one marker per folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from importlib import metadata
from pathlib import Path

import pytest

from tests.launch import LauncherHung

TESTS = Path(__file__).parent
MARKERS = ("mpi", "system", "faults", "gpu")


def pytest_report_header() -> list[str]:
    """Versions of what the ranks run on, read from metadata: pytest itself must not load MPI."""
    other = os.environ.get("MPIHPO_TEST_OPENMPI_PYTHON")
    return [
        "mpihpo: "
        + ", ".join(f"{name} {version(name)}" for name in ("mpi4py", "torch", "numpy", "h5py")),
        f"MPI: {mpi_wheels() or 'not from a wheel: ' + str(shutil.which('mpiexec'))}"
        f"; second MPI's Python: {other or 'none'}",
    ]


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def mpi_wheels() -> str:
    installed = {name: version(name) for name in ("mpich", "openmpi", "impi-rt")}
    return ", ".join(f"{n} {v}" for n, v in installed.items() if v != "not installed")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A launcher that does not return is no fault of what is tested, and hides the result."""
    try:
        return (yield)
    except LauncherHung as hung:
        pytest.skip(str(hung))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, so that ``-m "not mpi and not faults"`` needs no decorators."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if TESTS in item.path.parents else ""
        if folder in MARKERS:
            item.add_marker(folder)
        if folder == "gpu" and shutil.which("nvidia-smi") is None:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
