"""The rank timeline."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mpihpo.errors import ResultsError
from mpihpo.records import (
    Allocation,
    Ending,
    Evaluation,
    Failure,
    Objective,
    Outcome,
    RungPlan,
    RungResult,
    Spent,
    TrialRecord,
)
from mpihpo.report.timeline import draw_timeline, main
from mpihpo.results.file import write_results
from mpihpo.results.reader import Results
from mpihpo.results.tables import ResultTables

pytest.importorskip("matplotlib")


def outcome(trial: int, rung: int, ranks: tuple[int, ...], begin: float, has_failed: bool = False):
    evaluation = Evaluation(
        trial=TrialRecord(id=trial, config={"lr": 0.1}, seed=0),
        rung=rung,
        start=rung,
        stop=rung + 1,
    )
    return Outcome(
        allocation=Allocation(serial=0, evaluation=evaluation, ranks=ranks),
        ending=Ending.FAILED if has_failed else Ending.FINISHED,
        objective=None if has_failed else 1.0 + trial,
        failure=Failure(rank=0, kind="ValueError", message="x") if has_failed else None,
        t_start=begin,
        t_stop=begin + 10,
        spent=Spent(0.5, 0.5, 8.5, 0.5),
    )


@pytest.fixture
def tables() -> ResultTables:
    tables = ResultTables("", 0, Objective(metric="loss"), ["lr"], ["n1"] * 2 + ["n2"] * 2, {})
    tables.add_ladder([RungPlan(rung=0, start=0, stop=1, trials=4)])
    for trial in range(4):
        tables.add(outcome(trial, 0, (trial,), 0.0, has_failed=trial == 3))
    tables.add_rung(
        RungResult(rung=0, start=0, stop=1, evaluated=4, failed=1, promoted=(0, 1), best=1.0)
    )
    tables.add(outcome(0, 1, (0, 3), 10.0))
    tables.add(outcome(1, 1, (1, 2), 10.0))
    tables.finish("done", 21.0)
    return tables


def drawn_texts(path: Path) -> list[str]:
    """The texts of an SVG, which matplotlib notes in comments beside their outlines."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"), re.DOTALL)


def test_svg_says_who_trained_what(tables: ResultTables, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    draw_timeline(Results.from_tables(tables), path)
    texts = "\n".join(drawn_texts(path))
    for trial in range(4):
        assert f"trial {trial}" in texts
    assert "rung 0: 4 → 2" in texts
    assert "6 evaluations on 4 ranks" in texts
    assert "best: trial 0, loss 1 after 2 epochs" in texts
    assert {"n1", "n2", "failed", "idle"} <= set(texts.split("\n"))


def test_the_same_results_make_the_same_file(tables: ResultTables, tmp_path: Path) -> None:
    results = Results.from_tables(tables)
    draw_timeline(results, tmp_path / "a.png")
    draw_timeline(results, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_crowded_blocks_have_no_labels(tmp_path: Path) -> None:
    tables = ResultTables("", 0, Objective(metric="loss"), ["lr"], ["n"] * 1024, {})
    for rank in range(1024):
        tables.add(outcome(rank, 0, (rank,), 0.0))
    tables.finish("done", 10.0)
    draw_timeline(Results.from_tables(tables), tmp_path / "t.svg")
    assert not [text for text in drawn_texts(tmp_path / "t.svg") if text.startswith("trial ")]


def test_no_evaluation_at_all(tmp_path: Path) -> None:
    tables = ResultTables("", 0, Objective(metric="loss"), [], ["n"], {})
    draw_timeline(Results.from_tables(tables), tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 0


def test_command(tables: ResultTables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path / "results.h5", tables)
    assert main([str(tmp_path), str(tmp_path / "t.svg")]) == 0
    assert (tmp_path / "t.svg").exists()
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "none"), "t.svg"]) == 2
    assert main([str(tmp_path), "t.gif"]) == 2
    assert main([str(tmp_path), str(tmp_path / "no" / "t.svg")]) == 2
    usage, *problems = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage")
    assert len(problems) == 3


def test_without_matplotlib(
    tables: ResultTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ResultsError, match=r"pip install 'mpihpo\[report\]'"):
        draw_timeline(Results.from_tables(tables), tmp_path / "t.png")
