"""What a later job makes of the folder of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpihpo.errors import ExperimentError, ResultsError
from mpihpo.experiment import Experiment
from mpihpo.history import History
from mpihpo.records import Allocation, Ending, Outcome, Report
from mpihpo.results.entries import (
    Provenance,
    encode_experiment,
    encode_outcome,
    encode_start,
    encode_trial,
)
from mpihpo.results.journal import Journal
from mpihpo.runner.resume import EarlierRun, check_same, digest_of, read_run
from mpihpo.runner.saved_state import state_path, write_state
from mpihpo.runner.state import KeptState, take_tree
from tests.unit.virtual_clock import ended, evaluation, make, trial

SECTIONS: dict[str, Any] = {
    "train": "module:train",
    "objective": {"metric": "loss"},
    "search": {
        "trials": 4,
        "space": {"x": {"choices": [0, 1, 2, 3]}, "y": {"lower": 0, "upper": 1}},
    },
    "schedule": {"max_epochs": 4},
    "seed": 7,
    "arguments": {"data": "/a"},
}


def experiment(**changes: Any) -> Experiment:
    return Experiment.from_mapping({**SECTIONS, **changes})


def provenance(**changes: Any) -> Provenance:
    return Provenance(
        experiment_text=experiment(**changes).to_yaml(), seed=7, versions={}, nodes=("a",)
    )


def write_journal(folder: Path, *outcomes: Outcome, state: str = "disk", **changes: Any) -> Path:
    """An experiment, then for each outcome its trial, its start and itself."""
    path = folder / "journal.jsonl"
    with Journal(path) as journal:
        fields = encode_experiment(provenance(**changes))
        journal.append("experiment", train_digest="abc", **fields)
        known: set[int] = set()
        for outcome in outcomes:
            record = outcome.allocation.evaluation.trial
            if record.id not in known:
                journal.append("trial", **encode_trial(record))
            known.add(record.id)
            journal.append("start", **encode_start(outcome.allocation))
            journal.append("outcome", state=state, **encode_outcome(outcome))
    return path


def outcome(trial_id: int, serial: int, value: float = 1.0, **fields: Any) -> Outcome:
    work = evaluation(trial_id, stop=4, **fields)
    allocation = Allocation(serial=serial, evaluation=work, ranks=(0,), keepers=(0,))
    return ended(allocation, value)


FOUR = [outcome(i, i, float(i)) for i in range(4)]


def read(folder: Path) -> EarlierRun:
    return read_run(folder, "journal.jsonl", "checkpoints")


def flip(path: Path, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    middle = len(lines[line]) // 2
    lines[line] = lines[line][:middle] + b"\x01" + lines[line][middle + 1 :]
    path.write_bytes(b"".join(lines))


def to_do(history: History, trials: int = 4) -> list[int]:
    """The trials that a resumed job of a single rung starts, in order."""
    coordinator = make(trials, world=8, scheduler="none", epochs=(1, 4), limit=trials)
    coordinator.replay(history)
    starts = [
        instruction.allocation
        for instruction in coordinator.begin(0.0)
        if hasattr(instruction, "allocation")
    ]
    return [start.evaluation.trial.id for start in starts]


def test_everything_is_read_back(tmp_path: Path):
    write_journal(tmp_path, *FOUR)
    write_state(tmp_path / "checkpoints", KeptState(2, 3, {"a": take_tree(np.ones(1), copy=True)}))
    earlier = read(tmp_path)
    assert earlier.provenance == provenance()
    assert earlier.train_digest == "abc"
    assert earlier.history.trials == {i: trial(i) for i in range(4)}
    assert [step for step in earlier.history.steps if isinstance(step, Outcome)] == FOUR
    assert len(earlier.history.steps) == 8
    saved = state_path(tmp_path / "checkpoints", 2, 3)
    assert earlier.history.saved == {2: {3: saved.stat().st_size}}
    assert earlier.journal.problem is None
    assert to_do(earlier.history) == []


def test_a_torn_last_line_costs_that_line(tmp_path: Path):
    path = write_journal(tmp_path, *FOUR)
    path.write_bytes(path.read_bytes()[:-5])
    earlier = read(tmp_path)
    assert to_do(earlier.history) == [3]
    assert earlier.journal.problem is not None
    assert "entries lost: 1 (line 13 is torn), kept: 12" in earlier.journal.problem


@pytest.mark.parametrize(
    ("line", "again"),
    [
        (1, [0]),  # trial 0's entry: nothing that names it can be used
        (5, []),  # a start, whose outcome is there
        (6, [1]),  # an outcome
    ],
    ids=["trial", "start", "outcome"],
)
def test_a_flipped_byte_costs_that_evaluation(tmp_path: Path, line: int, again: list[int]):
    flip(write_journal(tmp_path, *FOUR), line)
    earlier = read(tmp_path)
    assert earlier.journal.problem is not None
    assert "entries lost: 1" in earlier.journal.problem
    assert to_do(earlier.history) == again


def test_every_single_line_may_be_damaged(tmp_path: Path):
    intact = write_journal(tmp_path, *FOUR).read_bytes()
    for line in range(13):
        (tmp_path / "journal.jsonl").write_bytes(intact)
        flip(tmp_path / "journal.jsonl", line)
        assert len(to_do(read(tmp_path).history)) <= 1


def test_without_its_first_entry_a_run_needs_force(tmp_path: Path):
    flip(write_journal(tmp_path, *FOUR), 0)
    earlier = read(tmp_path)
    assert earlier.provenance is None
    assert to_do(earlier.history) == []
    with pytest.raises(ExperimentError, match="has lost what its run was started with; --force"):
        check_same(experiment(), "abc", earlier)


@pytest.mark.parametrize("content", [b"", b'{"seq":0,"ti'])
def test_a_job_killed_before_its_first_entry_has_lost_nothing(tmp_path: Path, content: bytes):
    (tmp_path / "journal.jsonl").write_bytes(content)
    earlier = read(tmp_path)
    check_same(experiment(), "abc", earlier)
    assert to_do(earlier.history) == [0, 1, 2, 3]
    assert earlier.journal.end == 0


def test_a_journal_of_which_nothing_is_left_is_refused(tmp_path: Path):
    (tmp_path / "journal.jsonl").write_text("nothing\nof\nthis\n")
    with pytest.raises(ResultsError, match="every entry is lost, so it cannot be resumed"):
        read(tmp_path)
    with pytest.raises(ResultsError, match="cannot be read: No such file"):
        read(tmp_path / "nowhere")


def test_a_newer_layout_is_refused(tmp_path: Path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("experiment", **{**encode_experiment(provenance()), "layout": 99})
    with pytest.raises(ResultsError, match="layout 99"):
        read(tmp_path)


def test_what_has_no_state_goes_on_where_it_was(tmp_path: Path):
    stopped = ended(
        FOUR[1].allocation, None, Ending.INTERRUPTED, reports=(Report(3, {"loss": 1.0}, 1.0),)
    )
    failed = ended(FOUR[2].allocation, None, Ending.FAILED)
    early = ended(FOUR[3].allocation, None, Ending.INTERRUPTED)
    write_journal(tmp_path, FOUR[0], stopped, failed, early, state="none")
    saved = read(tmp_path).history.saved
    assert saved.get(0) == {4: 0}
    assert saved.get(1) == {3: 0}
    assert 4 not in saved.get(2, {})  # never got there
    assert 4 not in saved.get(3, {})


def test_a_state_that_was_lost_counts_as_none(tmp_path: Path):
    write_journal(tmp_path, FOUR[0], state="lost")
    assert read(tmp_path).history.saved == {}


def test_time_goes_on(tmp_path: Path):
    path = write_journal(tmp_path)
    with Journal(path, after=read(tmp_path).journal) as journal:
        journal.append("finish", reason="SIGTERM", seconds=12.5)
    assert read(tmp_path).seconds == 12.5


# What may differ.


def changed(path: str, value: Any) -> dict[str, Any]:
    section, _, key = path.partition(".")
    if not key:
        return {section: value}
    return {section: {**SECTIONS.get(section, {}), key: value}}


@pytest.mark.parametrize(
    ("path", "value", "where", "text"),
    [
        ("seed", 8, "seed", "is 8, was 7"),
        ("objective", {"metric": "loss", "mode": "max"}, "objective.mode", "is 'max', was 'min'"),
        ("schedule.max_epochs", 8, "schedule.max_epochs", "is 8, was 4"),
        ("arguments", {"data": "/b"}, "arguments.data", "is '/b', was '/a'"),
        ("train", "module:other", "train", "is 'module:other', was 'module:train'"),
        ("batch", {"size": 64}, "batch.size", "is 64, was 32"),
        (
            "search.space",
            {"x": {"choices": [0, 1]}, "y": {"lower": 0, "upper": 1}},
            "search.space.x",
            "is [0, 1], was [0, 1, 2, 3]",
        ),
    ],
)
def test_what_changes_the_results_is_refused(
    tmp_path: Path, path: str, value: Any, where: str, text: str
):
    write_journal(tmp_path)
    with pytest.raises(ExperimentError) as caught:
        check_same(experiment(**changed(path, value)), "abc", read(tmp_path))
    assert caught.value.where.startswith(where)
    assert text in caught.value.problem
    assert caught.value.problem.endswith("; --force resumes all the same")


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": {"time": "2h", "retries": 3}},
        {"allocation": {"policy": "fixed", "ranks": 2}},
        {"output": "/elsewhere"},
        {"process_group": "gloo"},
        {"coordinator": "dedicated"},
        changed("search.trials", 400),
    ],
)
def test_what_does_not_is_allowed(tmp_path: Path, changes: Mapping[str, Any]):
    write_journal(tmp_path)
    check_same(experiment(**changes), "abc", read(tmp_path))
    check_same(experiment(**changes), None, read(tmp_path))


def test_another_file_of_the_train_function_is_refused(tmp_path: Path):
    write_journal(tmp_path)
    message = "the file of module:train has changed: its digest is xyz, was abc; --force"
    with pytest.raises(ExperimentError, match=message):
        check_same(experiment(), "xyz", read(tmp_path))


def test_many_differences_are_counted(tmp_path: Path):
    write_journal(tmp_path)
    changes = {"seed": 1, "train": "a:b", "schedule": {"max_epochs": 9, "min_epochs": 3}}
    with pytest.raises(ExperimentError, match="and 1 more; --force"):
        check_same(experiment(**changes), "abc", read(tmp_path))


def test_a_forced_job_is_what_the_next_one_compares_with(tmp_path: Path):
    path = write_journal(tmp_path)
    with Journal(path, after=read(tmp_path).journal) as journal:
        journal.append("resume", train_digest="xyz", **encode_experiment(provenance(seed=8)))
    check_same(experiment(seed=8), "xyz", read(tmp_path))
    with pytest.raises(ExperimentError, match="is 7, was 8"):
        check_same(experiment(), "xyz", read(tmp_path))


def test_the_digest_is_that_of_the_file(tmp_path: Path):
    assert digest_of(test_time_goes_on) == digest_of(test_a_newer_layout_is_refused)
    assert digest_of(test_time_goes_on) != digest_of(take_tree)
    assert digest_of(len) is None
