"""What is written down, in which order, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpihpo.errors import ExperimentError, ResultsError
from mpihpo.experiment import Experiment
from mpihpo.instructions import COMPLETED
from mpihpo.records import Allocation, Ending, Evaluation, RungResult
from mpihpo.report.progress import Progress
from mpihpo.results.entries import Provenance
from mpihpo.results.journal import Journal, read_journal
from mpihpo.results.reader import Results
from mpihpo.runner import recorder as recorder_module
from mpihpo.runner.recorder import CHECKPOINTS, JOURNAL, RESULTS, Recorder
from mpihpo.runner.resume import EarlierRun, read_run
from mpihpo.runner.saved_state import saved_states, write_state
from mpihpo.runner.state import KeptState, take_tree
from tests.unit.virtual_clock import ended, evaluation

EXPERIMENT = Experiment.from_mapping(
    {
        "objective": {"metric": "loss"},
        "search": {"trials": 4, "space": {"x": {"choices": [0, 1, 2, 3]}}},
        "schedule": {"max_epochs": 4},
    }
)
PROVENANCE = Provenance(experiment_text=EXPERIMENT.to_yaml(), seed=0, versions={}, nodes=("a", "a"))


@contextmanager
def recording(
    folder: Path | None, *, earlier: EarlierRun | None = None, stream: StringIO | None = None
) -> Iterator[Recorder]:
    progress = None
    if stream is not None:
        progress = Progress(stream, (), 2, EXPERIMENT.objective)
    with Recorder(EXPERIMENT, PROVENANCE, "abc", (), folder, progress, earlier).open() as recorder:
        yield recorder


def lent(work: Evaluation, serial: int = 0) -> Allocation:
    return Allocation(serial=serial, evaluation=work, ranks=(0,), keepers=(0,))


def evaluate(
    recorder: Recorder, trial_id: int, rung: int = 0, *, saving: bool = False
) -> Allocation:
    """Start and end an evaluation of epochs (2 * rung, 2 * rung + 2]."""
    allocation = lent(evaluation(trial_id, rung, 2 * rung, 2 * rung + 2), serial=trial_id)
    recorder.started(allocation, 0.0)
    stop = allocation.evaluation.stop
    recorder.ended(ended(allocation, 1.0), 1.0, saving=stop if saving else None)
    return allocation


def save(folder: Path, trial_id: int, epoch: int) -> None:
    write_state(
        folder / CHECKPOINTS, KeptState(trial_id, epoch, {"a": take_tree(np.ones(2), copy=True)})
    )


def entries(folder: Path) -> list[dict[str, Any]]:
    content = read_journal(folder / JOURNAL)
    assert content.problem is None
    return list(content.entries)


def kinds(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (entry["kind"], *([entry["trial"]] if "trial" in entry else []))
        for entry in entries(folder)
    ]


def rung(evaluated: int, promoted: tuple[int, ...]) -> RungResult:
    return RungResult(
        rung=0, start=0, stop=2, evaluated=evaluated, failed=0, promoted=promoted, best=1.0
    )


def test_entries_stand_in_the_order_of_events(tmp_path: Path):
    with recording(tmp_path) as recorder:
        evaluate(recorder, 0)
        evaluate(recorder, 0, 1)
        recorder.note("notice", "hello")
        assert recorder.finish(COMPLETED, 3.0) is None
    assert kinds(tmp_path) == [
        ("experiment",),
        *(("trial", 0), ("start", 0), ("outcome", 0)),
        *(("start", 0), ("outcome", 0)),
        *(("notice",), ("finish",)),
    ]
    assert [e["state"] for e in entries(tmp_path) if e["kind"] == "outcome"] == ["none", "none"]


def test_an_outcome_waits_for_its_state_and_what_follows_waits_behind_it(tmp_path: Path):
    with recording(tmp_path) as recorder:
        evaluate(recorder, 0, saving=True)
        evaluate(recorder, 1, saving=True)
        recorder.note("notice", "hello")
        before = [("experiment",), ("trial", 0), ("start", 0)]
        assert kinds(tmp_path) == before
        recorder.saved(1, 2, None)  # the later one is first
        assert kinds(tmp_path) == before
        recorder.saved(0, 2, None)
        assert kinds(tmp_path) == [
            *before,
            *(("outcome", 0), ("trial", 1), ("start", 1), ("outcome", 1)),
            ("notice",),
        ]
    assert [e["state"] for e in entries(tmp_path) if e["kind"] == "outcome"] == ["disk", "disk"]


def test_a_state_that_cannot_be_saved_is_noted(tmp_path: Path):
    stream = StringIO()
    with recording(tmp_path, stream=stream) as recorder:
        evaluate(recorder, 0, saving=True)
        recorder.saved(0, 2, "OSError: No space left on device")
    *_, outcome, loss = entries(tmp_path)
    assert (outcome["kind"], outcome["state"]) == ("outcome", "lost")
    text = "trial 0: its state after epoch 2 is not on the disk: OSError: No space left on device"
    assert (loss["kind"], loss["text"]) == ("loss", text)
    assert text in stream.getvalue()


def test_a_state_is_deleted_after_what_replaces_it_is_in_the_journal(tmp_path: Path):
    with recording(tmp_path) as recorder:
        save(tmp_path, 0, 2)
        evaluate(recorder, 0, saving=True)
        recorder.saved(0, 2, None)
        evaluate(recorder, 0, 1, saving=True)
        recorder.drop(0, before=4)
        save(tmp_path, 0, 4)
        assert set(saved_states(tmp_path / CHECKPOINTS)) == {(0, 2), (0, 4)}
        recorder.saved(0, 4, None)
        assert kinds(tmp_path)[-1] == ("outcome", 0)
        assert set(saved_states(tmp_path / CHECKPOINTS)) == {(0, 4)}
        recorder.drop(0)
        assert set(saved_states(tmp_path / CHECKPOINTS)) == set()


def test_an_older_state_stays_when_the_newer_one_is_lost(tmp_path: Path):
    with recording(tmp_path) as recorder:
        save(tmp_path, 0, 2)
        evaluate(recorder, 0, saving=True)
        recorder.saved(0, 2, None)
        evaluate(recorder, 0, 1, saving=True)
        recorder.drop(0, before=4)
        recorder.saved(0, 4, "OSError: full")
        assert set(saved_states(tmp_path / CHECKPOINTS)) == {(0, 2)}


def test_where_room_is_short_nothing_is_waited_for(tmp_path: Path):
    with recording(tmp_path) as recorder:
        save(tmp_path, 0, 2)
        evaluate(recorder, 0, saving=True)
        recorder.saved(0, 2, None)
        evaluate(recorder, 1, saving=True)  # not on the disk so far: what comes later waits for it
        recorder.drop(0)
        assert set(saved_states(tmp_path / CHECKPOINTS)) == {(0, 2)}
        recorder.evict(0)
        assert set(saved_states(tmp_path / CHECKPOINTS)) == set()


def test_deletions_wait_for_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with recording(tmp_path) as recorder:
        save(tmp_path, 0, 2)
        evaluate(recorder, 0, saving=True)
        recorder.saved(0, 2, None)
        break_journal(monkeypatch)
        recorder.ended(ended(lent(evaluation(0)), None, Ending.FAILED), 2.0, saving=None)
        recorder.drop(0)
        assert set(saved_states(tmp_path / CHECKPOINTS)) == {(0, 2)}
        monkeypatch.undo()
        recorder.tick(100.0)
        assert set(saved_states(tmp_path / CHECKPOINTS)) == set()


def break_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: Journal, kind: str, /, **fields: Any) -> int:
        raise ResultsError(f"{self.path}: cannot be written: No space left on device")

    monkeypatch.setattr(Journal, "append", append)


def test_a_full_disk_delays_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stream = StringIO()
    with recording(tmp_path, stream=stream) as recorder:
        break_journal(monkeypatch)
        evaluate(recorder, 0)
        for now in (1.0, 2.0, 7.0, 20.0):
            recorder.tick(now)
        evaluate(recorder, 1)
        assert kinds(tmp_path) == [("experiment",)]
        monkeypatch.undo()
        recorder.tick(20.5)  # not yet: it is tried every few seconds
        assert kinds(tmp_path) == [("experiment",)]
        recorder.tick(26.0)
        assert kinds(tmp_path)[1:] == [
            *(("trial", 0), ("start", 0), ("outcome", 0)),
            *(("trial", 1), ("start", 1), ("outcome", 1)),
        ]
        assert recorder.finish(COMPLETED, 30.0) is None
    assert kinds(tmp_path)[-1] == ("finish",)
    assert stream.getvalue().count("the work goes on in memory until it can be written") == 1


def test_the_end_tells_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with recording(tmp_path) as recorder:
        break_journal(monkeypatch)
        evaluate(recorder, 0)
        problem = recorder.finish(COMPLETED, 3.0)
        assert problem == f"{tmp_path / JOURNAL}: cannot be written: No space left on device"
        assert Results(tmp_path).reason == COMPLETED  # what could be written was
        monkeypatch.undo()


def test_a_results_file_that_cannot_be_written_does_not_hold_up_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(path: Path, tables: object) -> None:
        raise ResultsError(f"{path}: cannot be written: No space left on device")

    with recording(tmp_path) as recorder:
        monkeypatch.setattr(recorder_module, "write_results", full)
        evaluate(recorder, 0)
        recorder.rung_closed(rung(1, ()), 1.0)
        evaluate(recorder, 1)
        assert kinds(tmp_path)[-1] == ("outcome", 1)
        problem = recorder.finish(COMPLETED, 3.0)
        assert problem == f"{tmp_path / RESULTS}: cannot be written: No space left on device"
        assert kinds(tmp_path)[-1] == ("finish",)
        monkeypatch.undo()
        assert recorder.finish(COMPLETED, 3.0) is None


def first_job(folder: Path) -> None:
    with recording(folder) as recorder:
        for trial_id in (0, 1):
            evaluate(recorder, trial_id)
        recorder.rung_closed(rung(2, (0,)), 1.0)
        evaluate(recorder, 0, 1)


def test_a_second_job_appends(tmp_path: Path):
    first_job(tmp_path)
    before = kinds(tmp_path)
    (tmp_path / RESULTS).unlink()
    earlier = read_run(tmp_path, JOURNAL, CHECKPOINTS)
    stream = StringIO()
    with recording(tmp_path, earlier=earlier, stream=stream) as recorder:
        assert recorder.trial_ids == {0, 1}
        recorder.rung_closed(rung(2, (0,)), 1.0)
        evaluate(recorder, 2)
        assert recorder.finish(COMPLETED, 9.0) is None
    after = kinds(tmp_path)
    assert after[: len(before)] == before
    assert after[len(before) :] == [
        *(("resume",), ("notice",)),
        *(("trial", 2), ("start", 2), ("outcome", 2)),
        ("finish",),
    ]
    assert "resuming after 3 outcomes" in stream.getvalue()
    results = Results(tmp_path)
    assert results.trials["id"].tolist() == [0, 1, 2]
    assert len(results.evaluations) == 4
    assert results.ladder["promoted"].tolist() == [1]


def test_a_rung_that_further_trials_changed_is_written_and_shown_again(tmp_path: Path):
    first_job(tmp_path)
    second = RungResult(rung=1, start=2, stop=4, evaluated=1, failed=0, promoted=(), best=1.0)
    for evaluated, written in ((3, 2), (3, 2)):  # by the second job, and not by the third
        earlier = read_run(tmp_path, JOURNAL, CHECKPOINTS)
        stream = StringIO()
        with recording(tmp_path, earlier=earlier, stream=stream) as recorder:
            recorder.rung_closed(rung(evaluated, (0,)), 1.0)
            recorder.rung_closed(second, 1.0)
        rungs = [entry for entry in entries(tmp_path) if entry["kind"] == "rung"]
        assert [entry["rung"] for entry in rungs] == [0, 0, 1]
        assert [entry["evaluated"] for entry in rungs] == [2, 3, 1]
        assert len(rungs) == written + 1


def test_half_written_states_of_a_killed_job_are_deleted(tmp_path: Path):
    first_job(tmp_path)
    save(tmp_path, 0, 4)
    half = tmp_path / CHECKPOINTS / ".trial-1-epoch-2.npz.99"
    half.touch()
    with recording(tmp_path, earlier=read_run(tmp_path, JOURNAL, CHECKPOINTS)) as recorder:
        assert not half.exists()
        recorder.drop(0)  # knows of what the earlier job saved
        assert set(saved_states(tmp_path / CHECKPOINTS)) == set()


def test_a_journal_that_grew_after_it_was_read_is_not_cut_off(tmp_path: Path):
    first_job(tmp_path)
    earlier = read_run(tmp_path, JOURNAL, CHECKPOINTS)
    with recording(tmp_path, earlier=earlier) as recorder:  # another job, which is over by now
        evaluate(recorder, 3)
    content = (tmp_path / JOURNAL).read_bytes()
    message = "was written to by another job until just now"
    with pytest.raises(ExperimentError, match=message), recording(tmp_path, earlier=earlier):
        pytest.fail("was opened")
    assert (tmp_path / JOURNAL).read_bytes() == content


def test_two_jobs_never_write_one_folder(tmp_path: Path):
    first_job(tmp_path)
    earlier = read_run(tmp_path, JOURNAL, CHECKPOINTS)
    with recording(tmp_path, earlier=earlier):
        content = (tmp_path / JOURNAL).read_bytes()
        with pytest.raises(ExperimentError, match="in use"), recording(tmp_path, earlier=earlier):
            pytest.fail("was opened")
        assert (tmp_path / JOURNAL).read_bytes() == content


def test_without_a_folder_nothing_is_written_and_all_is_known():
    with recording(None) as recorder:
        evaluate(recorder, 0)
        recorder.drop(0)
        recorder.tick(1.0)
        assert recorder.finish(COMPLETED, 2.0) is None
        assert Results.from_tables(recorder.tables).reason == COMPLETED
