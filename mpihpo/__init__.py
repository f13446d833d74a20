"""Hyper-parameter optimisation inside one MPI job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpihpo.errors import MpihpoError
    from mpihpo.experiment import Experiment
    from mpihpo.records import Objective
    from mpihpo.results.reader import Results
    from mpihpo.runner.job import run
    from mpihpo.runner.trial import Trial

__version__ = "0.1.0"

__all__ = [
    "Experiment",
    "MpihpoError",
    "Objective",
    "Results",
    "Trial",
    "__version__",
    "run",
]

# Loaded at their first use, so that importing the package loads neither MPI, torch nor HDF5.
_HOMES = {
    "Experiment": "mpihpo.experiment",
    "MpihpoError": "mpihpo.errors",
    "Objective": "mpihpo.records",
    "Results": "mpihpo.results.reader",
    "Trial": "mpihpo.runner.trial",
    "run": "mpihpo.runner.job",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
