"""Whatever is wrong before the start: one line, printed once, status 2 and no folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch import ROOT, Mpi, run_ranks
from tests.system.experiments import FUNCTIONS, write_experiment

TRAIN = f"{FUNCTIONS}/light.py:always"
SPACE = {"x": {"lower": 0, "upper": 1}}
RIGHT: dict[str, Any] = {"train": TRAIN, "search": {"trials": 4, "space": SPACE}}
KEYS = (
    "train, objective, search, schedule, allocation, seed, batch, limits, process_group, "
    "coordinator, output, arguments"
)

# Sections to replace, and the line without "mpihpo: "; {folder} is where the experiment lies.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"schedul": {}},
        f"schedul: unknown key; did you mean schedule? known keys: {KEYS}",
    ),
    "impossible value": (
        {"schedule": {"max_epochs": 0}},
        "schedule.max_epochs: 0 is not possible; expected a whole number of at least 1",
    ),
    "no such file": (
        {"train": "absent.py:train"},
        "train: 'absent.py:train': there is no file absent.py in {folder}",
    ),
    "no such function": (
        {"train": "broken.py:other"},
        "train: 'broken.py:other' cannot be imported: ModuleNotFoundError: "
        "No module named 'not_there' (line 1 of {folder}/broken.py)",
    ),
    "later scheduler": (
        {"schedule": {"scheduler": "asha", "max_epochs": 4}},
        "schedule.scheduler: there is no 'asha'; available: none, successive_halving, "
        "or your own as package.module:Name",
    ),
    "space": (
        {"search": {"trials": 4, "space": {"lr": {"lower": 1, "upper": 0.1, "log": True}}}},
        "search.space.lr.lower: 1.0 is not below upper, which is 0.1",
    ),
    "no trials": (
        {"search": {"space": SPACE}},
        "search.trials: missing; expected how many to draw at random",
    ),
    "unwritable output": (
        {"output": "/dev/null/run"},
        "output: /dev/null/run cannot be made: Not a directory",
    ),
    "a run is there": (
        {"output": "{folder}/earlier"},
        "output: {folder}/earlier holds a run already; expected another folder, or --resume",
    ),
}
RANKS_LINE = (
    "allocation.ranks: 4 ranks per trial is more than the job's training ranks; expected at most 2"
)


def prepare(folder: Path, sections: dict[str, Any]) -> Path:
    (folder / "broken.py").write_text("import not_there\n\n\ndef train(config, trial): ...\n")
    (folder / "earlier").mkdir()
    (folder / "earlier" / "journal.jsonl").touch()
    return write_experiment(folder, None, **placed({**RIGHT, **sections}, folder))


def placed(value: Any, folder: Path) -> Any:
    text: str = yaml.safe_dump(value)
    return yaml.safe_load(text.replace("{folder}", str(folder)))


def check_refused(mpi: Mpi, folder: Path, arguments: list[str], line: str) -> None:
    before = sorted(folder.rglob("*"))
    result = run_ranks(mpi, 2, ["-B", "-m", "mpihpo", *arguments], cwd=folder, rc=2)
    assert result.stderr == f"mpihpo: {line}\n", result.describe()
    assert not result.stdout
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("kind", WRONG)
def test_one_line_for_a_wrong_experiment(mpi: Mpi, tmp_path: Path, kind: str):
    sections, line = WRONG[kind]
    path = prepare(tmp_path, sections)
    check_refused(mpi, tmp_path, ["run", str(path)], line.replace("{folder}", str(tmp_path)))


def test_one_line_for_more_ranks_than_there_are(mpi: Mpi, tmp_path: Path):
    path = prepare(tmp_path, {"allocation": {"ranks": 4}})
    check_refused(mpi, tmp_path, ["run", str(path)], RANKS_LINE)


def test_one_line_for_a_wrong_override(mpi: Mpi, tmp_path: Path):
    path = prepare(tmp_path, {})
    check_refused(
        mpi,
        tmp_path,
        ["run", str(path), "--set", "search.trials=none"],
        "search.trials: 'none' is not possible; expected a whole number of at least 1",
    )


def test_one_line_for_a_broken_file(mpi: Mpi, tmp_path: Path):
    path = tmp_path / "experiment.yaml"
    path.write_text("train: a.b:c\nsearch: {trials: 4\nseed: 3\n")
    reason = "while parsing a flow mapping expected ',' or '}', but got ':'"
    check_refused(mpi, tmp_path, ["run", str(path)], f"{path}:3: not valid YAML: {reason}")


def test_one_line_for_wrong_arguments(mpi: Mpi, tmp_path: Path):
    check_refused(
        mpi,
        tmp_path,
        ["run", "experiment.yaml", "--outputs", "x"],
        "unrecognized arguments: --outputs x; see mpihpo --help",
    )


@pytest.mark.parametrize("kind", [kind for kind in WRONG if "output" not in WRONG[kind][0]])
def test_check_says_the_same_without_mpi(tmp_path: Path, kind: str):
    sections, line = WRONG[kind]
    path = prepare(tmp_path, sections)
    done = check(path)
    assert done.stderr == f"mpihpo: {line}\n".replace("{folder}", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")


def test_check_knows_a_world_that_is_too_small(tmp_path: Path):
    path = prepare(tmp_path, {"allocation": {"ranks": 4}})
    assert check(path, "--ranks", "2").stderr == f"mpihpo: {RANKS_LINE}\n"
    done = check(path, "--ranks", "4")
    assert (done.returncode, done.stderr) == (0, "")


def check(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # An mpi4py that cannot be imported: check must not want it.
    (path.parent / "mpi4py.py").write_text("raise ImportError('no MPI here')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(path.parent)!r}); "
        "from mpihpo.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-B", "-c", code, "check", str(path), *options],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=path.parent,
        check=False,
    )
