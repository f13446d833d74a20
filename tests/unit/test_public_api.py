"""The public names, and that importing the package loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mpihpo

HEAVY = ("mpi4py", "mpi4py.MPI", "torch", "h5py", "numpy", "yaml")
NAMES = [
    "Experiment",
    "MpihpoError",
    "Objective",
    "Results",
    "Trial",
    "__version__",
    "run",
]


def loaded(code):
    """Which heavy modules a fresh interpreter has loaded after running the code."""
    report = f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", code + report]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_all_is_sorted_complete_and_listed():
    assert mpihpo.__all__ == sorted(mpihpo.__all__) == NAMES
    assert set(NAMES) <= set(dir(mpihpo))
    assert mpihpo.__version__ == "0.1.0"


def test_every_public_name_is_there():
    # In a process of its own: some of them load MPI.
    code = f"import mpihpo; print([getattr(mpihpo, name).__class__ for name in {NAMES}])"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_public_names_are_their_homes_objects():
    from mpihpo.errors import MpihpoError
    from mpihpo.experiment import Experiment
    from mpihpo.records import Objective

    assert mpihpo.Experiment is Experiment
    assert mpihpo.MpihpoError is MpihpoError
    assert mpihpo.Objective is Objective


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match=r"^module 'mpihpo' has no attribute 'Study'$"):
        _ = mpihpo.Study


@pytest.mark.parametrize(
    "code",
    [
        "import mpihpo",
        "import mpihpo.cli; mpihpo.cli.main(['--help'])",
        "import mpihpo; mpihpo.Experiment, mpihpo.Objective, mpihpo.MpihpoError",
        "import mpihpo.coordinator",
    ],
    ids=["package", "help", "experiment", "coordinator"],
)
def test_importing_loads_nothing_heavy(code):
    found = loaded(code)
    assert [name for name in HEAVY if name in found] == []


def test_reading_yaml_loads_yaml_alone():
    code = (
        "from mpihpo.experiment import load_experiment\n"
        "import mpihpo.examples, pathlib\n"
        "load_experiment(pathlib.Path(mpihpo.examples.__path__[0]) / 'digits.yaml')"
    )
    assert loaded(code) == ["yaml"]
