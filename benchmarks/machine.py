"""What every result must state: the machine, the versions, the day."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "mpi4py", "numpy", "h5py")


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def header(title: str) -> str:
    """The lines at the top of a result; loads no heavy package."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return "\n".join(
        (
            f"# {title}",
            f"machine   {_processor()}, {cores()} cores, {platform.system()} {platform.machine()}",
            f"versions  python {platform.python_version()}, {_versions()}",
            f"date      {date.today().isoformat()}, load average before {load}",
        )
    )


def mpi_library() -> str:
    """Name and version of the MPI library of this process."""
    from mpi4py import MPI

    text: str = MPI.Get_library_version().replace("\0", " ")
    line = " ".join(text.splitlines()[0].split())
    return line.partition(", package")[0]


def package() -> str:
    """The folder that this process has the package from."""
    import mpihpo

    return str(Path(mpihpo.__file__).resolve().parent)


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
