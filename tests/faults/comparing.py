"""Whether a job that was disturbed came to what one comes to that nothing disturbs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from mpihpo import Results
from mpihpo.results.journal import read_journal
from tests.faults.train_functions import marks

MARKS = "marks.jsonl"


def entries(folder: Path) -> tuple[dict[str, Any], ...]:
    """Of the journal of the run in an experiment's folder."""
    journal = folder / "run" / "journal.jsonl"
    return read_journal(journal).entries if journal.exists() else ()


def finished(folder: Path) -> list[tuple[int, int]]:
    """Trial and rung of every evaluation that the journal says has finished."""
    return [
        (entry["trial"], entry["rung"])
        for entry in entries(folder)
        if entry["kind"] == "outcome" and entry["ending"] == "finished"
    ]


def trained(folder: Path) -> list[tuple[int, int, float]]:
    """Trial, epoch and loss of every epoch that was trained, in order."""
    return [(mark["trial"], mark["epoch"], mark["loss"]) for mark in _trained(folder)]


def trained_rungs(folder: Path) -> list[tuple[int, int]]:
    """Trial and rung of every epoch that was trained, in order."""
    return [(mark["trial"], mark["rung"]) for mark in _trained(folder)]


def _trained(folder: Path) -> list[dict[str, Any]]:
    return [mark for mark in marks.read(folder / MARKS) if mark["what"] == "trained"]


def check_same(folder: Path, expected: Path, *, is_whole: bool = True) -> None:
    """The results are those of the other run, and nothing that finished was done twice.

    Args:
        folder: Of the experiment that was disturbed.
        expected: Of the one that was not.
        is_whole: Whether the journal has lost nothing.
    """
    results, other = Results(folder / "run"), Results(expected / "run")
    for name in ("id", "status", "rung", "epochs", "best", "last", "config"):
        assert results.trials[name].tolist() == other.trials[name].tolist(), name
    for name in ("rung", "start", "stop", "evaluated", "failed", "promoted", "best"):
        assert results.ladder[name].tolist() == other.ladder[name].tolist(), name
    assert results.best is not None
    assert other.best is not None
    assert results.best.trial == other.best.trial
    assert results.reason == "completed"
    assert set(finished(folder)) == set(finished(expected))
    if is_whole:
        assert set(Counter(finished(folder)).values()) == {1}
    # To the last bit, whenever, however often and on whichever rung an epoch was trained.
    assert set(trained(folder)) == set(trained(expected))
