"""A failing trial is a data point: its first traceback is kept, its ranks train the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.launch import Mpi
from tests.system.experiments import Finished, line_of, run_experiment, without_ansi

# What the leader of a trial of any size does: class and text of the error; None: the trial is fine.
BY_KIND: dict[str, tuple[str, str] | None] = {
    "nan": ("ObjectiveError", "epoch 1: loss is nan"),
    "inf": ("ObjectiveError", "epoch 1: loss is inf"),
    "-inf": ("ObjectiveError", "epoch 1: loss is -inf"),
    "text": ("ObjectiveError", "epoch 1: loss is 'low\\n', not a number"),
    "None": ("ObjectiveError", "epoch 1: loss is None, not a number"),
    "two numbers": ("ObjectiveError", "epoch 1: loss is array([0., 0.]), not a number"),
    "another metric": (
        "MissingReportError",
        "epoch 1 ended without trial.report(1, loss=...)",
    ),
    "nothing reported": (
        "MissingReportError",
        "epoch 1 ended without trial.report(1, loss=...)",
    ),
    "ends the loop": ("MissingReportError", "epoch 1 ended without trial.report(1, loss=...)"),
    "a later epoch": ("TrialError", "report(2): expected an epoch from 1 to 1"),
    "epoch 0": ("TrialError", "report(0): expected an epoch from 1 to 1"),
    "no text": ("Unprintable", "<exception str() failed>"),
    "recursion": ("RecursionError", "maximum recursion depth exceeded"),
    "iteration": ("StopIteration", ""),
    "exits": ("SystemExit", "enough"),
    "attaches twice": ("StateError", "attach(a=...): this name is attached already"),
    "nan beside": None,
    "changes the folder": None,
    "an integer": None,
}
WAITS = (
    *("allreduce", "Allreduce", "Barrier", "bcast", "recv", "Recv", "mean", "epochs", "attach"),
    "Split",
)

# Where a rank fails: the line that must be named, and on which positions it does so.
IN_TORCH = {
    "before the first collective": ('raise Chosen("before the first collective")', (0, 1, 2)),
    "in forward": ('raise Chosen("in forward")', (0, 1, 2)),
    "in backward": ("raise context.error", (0, 1, 2)),
    "out of memory": ("raise context.error", (0, 1, 2)),
    "in a loader": ('raise Chosen("in a loader\'s worker")', (0, 1, 2)),
    "in a metric": ('raise Chosen("in a metric")', (0,)),
    "exits": ("sys.exit(3)", (0, 1, 2)),
    "after the loop": ('raise Chosen("after the loop")', (0, 1, 2)),
    "in state_dict": ('raise Chosen("in state_dict")', (0,)),
    "nothing": ("", ()),
}
POSITIONS = (0, 1, 2)


def test_what_a_leader_may_do_wrong(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(mpi, 3, tmp_path, "light:wrong", space={"kind": list(BY_KIND)})
    found = {
        finished.configs[trial]["kind"]: failure and (failure["kind"], failure["message"])
        for trial, failure in finished.failures.items()
    }
    assert found == BY_KIND
    assert finished.results.metrics == ("", "a/b", "accuracy", "loss", "other", "\u00e9")
    errors = finished.results.trials["error"]
    assert errors[list(BY_KIND).index("nan")] == "ObjectiveError: epoch 1: loss is nan"
    without_ansi(finished.output)


def test_odd_characters_harm_neither_output_nor_results(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        1,
        tmp_path,
        "light:wrong",
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


def test_ranks_that_wait_for_a_failed_one_are_released(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        4,
        tmp_path,
        "light:peer",
        space={"where": WAITS, "failing": POSITIONS},
        allocation={"policy": "fixed", "ranks": 3},
        rc=1,
    )
    assert len(finished.outcomes) == len(WAITS) * len(POSITIONS)
    for outcome in finished.outcomes:
        config, failure = finished.configs[outcome["trial"]], outcome["failure"]
        assert failure["kind"] == "MemoryError"
        assert failure["message"] == f"while the others are in {config['where']}"
        assert failure["rank"] == outcome["ranks"][config["failing"]]
        assert outcome["t_stop"] - outcome["t_start"] < 5
    assert finished.results.best is None


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


def test_every_trial_fails(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(mpi, 2, tmp_path, "light:always", space={"x": [1, 2, 3]}, rc=1)
    assert finished.results.reason == "every trial failed"
    assert finished.results.best is None
    assert finished.output.count("light.Chosen: as always") == 1


def test_a_failure_at_any_point_on_any_rank_with_torch(mpi: Mpi, tmp_path: Path):
    finished = run_experiment(
        mpi,
        4,
        tmp_path,
        "failing:train",
        space={"failure": list(IN_TORCH), "position": POSITIONS},
        allocation={"policy": "fixed", "ranks": 3},
        batch={"size": 6},
        process_group="gloo",
        timeout=120,
    )
    assert len(finished.outcomes) == len(IN_TORCH) * len(POSITIONS)
    seen = set()
    for outcome in finished.outcomes:
        config = finished.configs[outcome["trial"]]
        text, positions = IN_TORCH[config["failure"]]
        case = (config["failure"], config["position"])
        if config["position"] not in positions:
            assert outcome["ending"] == "finished", case
            continue
        seen.add(case)
        check_failure(finished, outcome, config["position"], text)
    assert len(seen) == sum(len(positions) for _, positions in IN_TORCH.values())
    without_ansi(finished.output)


def check_failure(finished: Finished, outcome: dict[str, Any], position: int, text: str) -> None:
    case = (finished.configs[outcome["trial"]], outcome["failure"])
    failure = outcome["failure"]
    assert failure is not None, case
    assert failure["rank"] == outcome["ranks"][position], case
    assert f'failing.py", line {line_of("failing", text)}, in ' in failure["traceback"], case
    assert outcome["t_stop"] - outcome["t_start"] < 10, case
    line = f" trial={outcome['trial']} "
    (printed,) = [each for each in finished.output.splitlines() if line in each]
    assert printed.endswith(f"error={failure['kind']}: {failure['message']}".rstrip()), case
