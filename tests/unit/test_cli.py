"""The commands: exit statuses, one line for each mistake, and the printed plan."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from mpihpo import cli, errors

YAML = """\
train: train_for_cli.py:train
objective: {metric: val_loss}
seed: 17
search:
  trials: 16
  space:
    lr:        {lower: 1e-4, upper: 1.0, log: true}
    optimizer: {choices: [sgd, adam]}
    momentum:  {lower: 0.5, upper: 0.99, when: {optimizer: sgd}}
schedule: {max_epochs: 8}
"""

PLAN = """\
train       train_for_cli.py:train
objective   val_loss, min
search      random, 16 configurations, seed 17
  lr         0.0001 .. 1, log
  optimizer  sgd | adam
  momentum   0.5 .. 0.99  when optimizer is sgd
schedule    successive_halving, reduction_factor 2
  rung  epochs  trials  ranks per trial
     0       1      16                1
     1       2       8                2
     2     3-4       4                4
     3     5-8       2                4
allocation  doubling, ranks 1
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    (tmp_path / "train_for_cli.py").write_text("def train(config, trial): pass\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "experiment.yaml"
    file.write_text(YAML)
    yield file
    sys.modules.pop("train_for_cli", None)


@pytest.fixture
def job(monkeypatch):
    """Stands in for the job: records its calls, returns or raises what it is told."""
    fake = types.ModuleType("mpihpo.runner.command")
    fake.calls = []
    fake.result = 0

    def main(path, **options):
        fake.calls.append((path, options))
        if isinstance(fake.result, Exception):
            raise fake.result
        return fake.result

    fake.main = main
    monkeypatch.setitem(sys.modules, "mpihpo.runner.command", fake)
    return fake


def test_check_prints_the_plan(path, capsys):
    assert cli.main(["check", str(path), "--ranks", "4"]) == 0
    assert capsys.readouterr() == (PLAN, "")


def test_check_without_ranks_leaves_them_out(path, capsys):
    overrides = ["--set", "search.trials=9", "--set", "schedule.reduction_factor=3"]
    assert cli.main(["check", str(path), *overrides]) == 0
    out = capsys.readouterr().out
    rows = ["rung  epochs  trials", "   0       1       9", "   1     2-3       3"]
    assert "".join(f"  {row}\n" for row in [*rows, "   2     4-8       1"]) in out
    assert "search      random, 9 configurations" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--set", "search.space.lr.lower=2"],
            "search.space.lr.lower: 2.0 is not below upper, which is 1.0",
        ),
        (
            ["--set", "schedule.max_epoch=3"],
            "schedule.max_epoch: unknown key; did you mean max_epochs? known keys: "
            "scheduler, reduction_factor, min_epochs, max_epochs",
        ),
        (
            ["--set", "schedule.scheduler=hyperband"],
            "schedule.scheduler: there is no 'hyperband'; available: none, successive_halving, "
            "or your own as package.module:Name",
        ),
        (
            ["--set", "train=train_for_cli.py:tain"],
            "train: 'train_for_cli.py:tain': train_for_cli.py has no tain",
        ),
        (
            ["--ranks", "4", "--set", "allocation.ranks=5"],
            "allocation.ranks: 5 ranks per trial is more than the job's training ranks; "
            "expected at most 4",
        ),
    ],
)
def test_check_refuses_in_one_line_with_status_2(path, capsys, arguments, line):
    assert cli.main(["check", str(path), *arguments]) == 2
    assert capsys.readouterr() == ("", f"mpihpo: {line}\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "mpihpo: the following arguments are required: COMMAND; see mpihpo --help"),
        (
            ["check"],
            "mpihpo check: the following arguments are required: EXPERIMENT; "
            "see mpihpo check --help",
        ),
        (
            ["check", "e.yaml", "--ranks", "0"],
            "mpihpo check: argument --ranks: '0' is not a whole number of at least 1; "
            "see mpihpo check --help",
        ),
        (
            ["run", "e.yaml", "--force"],
            "mpihpo: --force goes with --resume only; see mpihpo --help",
        ),
        (
            ["run", "e.yaml", "--nosuch"],
            "mpihpo: unrecognized arguments: --nosuch; see mpihpo --help",
        ),
        (
            ["run", "e.yaml", "--out", "x"],
            "mpihpo: unrecognized arguments: --out x; see mpihpo --help",
        ),
    ],
)
def test_wrong_arguments_are_one_line_with_status_2(capsys, arguments, line):
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", line + "\n")


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_wrong_arguments_are_said_by_the_first_rank_only(monkeypatch, capsys, variable):
    monkeypatch.setenv(variable, "3")
    assert cli.main(["run"]) == 2
    assert capsys.readouterr() == ("", "")


def test_unknown_commands_list_those_there_are(capsys):
    assert cli.main(["plam"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "run" in err
    assert "check" in err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "-h"]])
def test_help_is_no_error(capsys, arguments):
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: mpihpo")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "mpihpo 0.1.0\n"


@pytest.mark.parametrize("status", [0, 1, 2, 70, 75])
def test_run_hands_over_to_the_job_and_returns_its_status(job, status):
    job.result = status
    arguments = ["run", "e.yaml", "--output", "out", "--set", "seed=3", "--set", "a=b", "--quiet"]
    arguments += ["--resume", "--force"]
    assert cli.main(arguments) == status
    options = {"output": "out", "overrides": ["seed=3", "a=b"], "quiet": True}
    options |= {"resume": True, "force": True}
    assert job.calls == [(Path("e.yaml"), options)]


def test_run_without_options(job):
    assert cli.main(["run", "e.yaml"]) == 0
    options = {"output": None, "overrides": [], "quiet": False, "resume": False, "force": False}
    assert job.calls == [(Path("e.yaml"), options)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ExperimentError("seed", "wrong"), 2),
        (errors.SpaceError("search.space", "wrong"), 2),
        (errors.ResultsError("cannot write\nout"), 2),
        (errors.InternalError("broken"), 70),
        (errors.CommError("no group"), 70),
    ],
)
def test_errors_of_the_job_are_one_line(job, capsys, error, status):
    job.result = error
    assert cli.main(["run", "e.yaml"]) == status
    assert capsys.readouterr().err == f"mpihpo: {' '.join(str(error).split())}\n"


def test_python_m_mpihpo_checks_without_mpi(path):
    command = [sys.executable, "-X", "importtime", "-m", "mpihpo", "check", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert ran.stdout.startswith("train       train_for_cli.py:train\n")
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "yaml" in imported
    assert imported.isdisjoint({"mpi4py", "torch", "h5py", "numpy"})
