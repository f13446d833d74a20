"""A failing trial is a data point: its first traceback is kept, its ranks train the next one."""

from __future__ import annotations

from pathlib import Path

from tests.launch import Mpi
from tests.system.experiments import run_experiment, without_ansi


def test_what_a_leader_may_do(mpi: Mpi, tmp_path: Path):
    kinds = ["nan beside", "changes the folder", "an integer"]
    finished = run_experiment(mpi, 3, tmp_path, "light:odd", space={"kind": kinds})
    assert list(finished.failures.values()) == [None] * len(kinds)
    assert finished.results.metrics == ("", "a/b", "loss", "other", "\u00e9")
    without_ansi(finished.output)


def test_odd_characters_harm_neither_output_nor_results(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        1,
        tmp_path,
        "light:odd",
        space={"kind": ["odd characters", "no pickle", "an integer"]},
        env={"PYTHONIOENCODING": "ascii:strict"},
    )
    failure = finished.failures[0]
    assert failure is not None
    assert failure["message"].startswith("line one line two \udc80\x00\x1b[31m\u00e9 long long")
    assert failure["message"].count("\n") == 0
    # The lines after the odd one are there, too.
    assert " trial=2 " in finished.output
    assert " rung=0 " in finished.output
    assert finished.results.trials["error"][0].startswith("Chosen: line one line two")


def test_a_tenth_of_a_hundred_trials_fails(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        4,
        tmp_path,
        "light:every_tenth",
        search={"trials": 100, "space": {"x": {"lower": 0, "upper": 1}}},
    )
    failed = {trial for trial, failure in finished.failures.items() if failure}
    assert failed == set(range(3, 100, 10))
    statuses = finished.results.trials["status"].tolist()
    assert (statuses.count("failed"), statuses.count("completed"), len(statuses)) == (10, 90, 100)
    # One traceback for all of one kind.
    assert finished.output.count("Traceback (most recent call last)") == 1
