"""Progress: plain lines, few of them, and a live view that fits the terminal."""

from __future__ import annotations

import io

import pytest

from mpihpo.records import (
    Allocation,
    Ending,
    Evaluation,
    Failure,
    Objective,
    Outcome,
    Report,
    RungPlan,
    RungResult,
    TrialRecord,
)
from mpihpo.report.progress import LINES_PER_SECOND, Progress

OBJECTIVE = Objective(metric="val_loss")
PLAN = (
    RungPlan(rung=0, start=0, stop=1, trials=40),
    RungPlan(rung=1, start=1, stop=2, trials=20),
)
TRACEBACK = 'Traceback:\n  File "train.py", line {line}, in train\nValueError: x'


def allocation(trial: int, rung: int = 1, ranks: tuple[int, ...] = (0, 1)) -> Allocation:
    record = TrialRecord(id=trial, config={"lr": 0.25, "optimizer": "sgd"}, seed=0)
    plan = PLAN[rung]
    evaluation = Evaluation(trial=record, rung=rung, start=plan.start, stop=plan.stop)
    return Allocation(serial=trial, evaluation=evaluation, ranks=ranks)


def finished(trial: int, value: float = 0.41234, rung: int = 1) -> Outcome:
    return Outcome(allocation=allocation(trial, rung), ending=Ending.FINISHED, objective=value)


def failed(trial: int, line: int = 3) -> Outcome:
    failure = Failure(
        rank=0,
        kind="ValueError",
        message=f"bad {trial}\nmore",
        traceback=TRACEBACK.format(line=line),
    )
    return Outcome(allocation=allocation(trial), ending=Ending.FAILED, failure=failure)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def progress(stream: io.StringIO) -> Progress:
    return Progress(stream, PLAN, 4, OBJECTIVE)


def test_one_line_per_outcome_and_rung(progress: Progress, stream: io.StringIO) -> None:
    progress.started(allocation(7), 11.0)
    progress.reported(7, Report(2, {"val_loss": 0.41234}, 1.0), 12.0)
    progress.finished(finished(7), 12.34)
    progress.rung_closed(
        RungResult(rung=1, start=1, stop=2, evaluated=8, failed=1, promoted=(7, 3), best=0.41234),
        12.4,
    )
    progress.note("resumed")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "12.3s trial=7 rung=1 epochs=2 ranks=0-1 val_loss=0.4123",
        "12.4s rung=1 epochs=2 evaluated=8 failed=1 promoted=2 best=0.4123",
        "resumed",
    ]


def test_a_flood_is_counted(progress: Progress, stream: io.StringIO) -> None:
    for trial in range(500):
        progress.finished(finished(trial), 3.5)
    progress.finished(finished(500), 4.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == LINES_PER_SECOND + 2
    assert lines[-2] == "+ 480 more outcomes"
    assert "trial=500" in lines[-1]


def test_what_was_held_back_is_told_at_the_end(progress: Progress, stream: io.StringIO) -> None:
    for trial in range(LINES_PER_SECOND + 3):
        progress.finished(finished(trial), 3.5)
    progress.close()
    assert stream.getvalue().endswith("+ 3 more outcomes\n")


def test_the_same_traceback_is_shown_once(progress: Progress, stream: io.StringIO) -> None:
    for trial in range(3):
        progress.finished(failed(trial), 1.0)
    progress.finished(failed(3, line=8), 1.0)
    text = stream.getvalue()
    assert text.count("Traceback") == 2
    assert text.count("line 3") == 1
    assert "1.0s trial=2 rung=1 epochs=2 ranks=0-1 failed error=ValueError: bad 2\n" in text
    assert "more" not in text


def test_tracebacks_do_not_flood_either(progress: Progress, stream: io.StringIO) -> None:
    for trial in range(500):
        progress.finished(failed(trial, line=trial), 1.0)
    assert stream.getvalue().count("Traceback") == 20
    assert len(stream.getvalue().splitlines()) < 20 * 5 + LINES_PER_SECOND + 1


def test_a_broken_stream_does_not_stop_the_job(progress: Progress, stream: io.StringIO) -> None:
    stream.close()
    progress.finished(finished(1), 1.0)
    progress.close()


def test_plain_without_rich(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpihpo.report.progress.find_spec", lambda _: None)
    progress = Progress(stream, PLAN, 4, OBJECTIVE, interactive=True)
    progress.finished(finished(7), 12.34)
    progress.close()
    assert stream.getvalue() == "12.3s trial=7 rung=1 epochs=2 ranks=0-1 val_loss=0.4123\n"


class TestLive:
    """The view that rich draws."""

    @pytest.fixture
    def live(self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Progress:
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setenv("LINES", "14")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        return Progress(stream, PLAN, 64, OBJECTIVE, interactive=True)

    def test_it_shows_what_is_going_on(self, live: Progress, stream: io.StringIO) -> None:
        for trial in range(40):
            live.finished(finished(trial, 1.0 - trial / 100, rung=0), 0.0)
        live.started(allocation(39, ranks=(4, 5, 6, 7)), 60.0)
        live.reported(39, Report(2, {"val_loss": 0.5}, 1.0), 61.0)
        text = stream.getvalue()
        last = text[text.rindex("rung 0") :]
        assert "40/40 trials" in last
        assert "0/20 trials" in last
        assert "4/64" in last
        assert "2/2" in last
        assert "4-7" in last
        assert "best: trial 39" in last
        assert "val_loss=0.61 at epoch 1" in last
        live.close()

    def test_it_fits_the_terminal(self, live: Progress) -> None:
        from rich.console import Console

        for trial in range(64):
            live.started(allocation(trial, ranks=tuple(range(0, 64, 2))), 1.0)
        live.finished(finished(63), 1.0)
        console = Console(width=60, height=14, file=io.StringIO())
        assert live._live is not None
        lines = console.render_lines(live._live.picture(), pad=False)
        assert len(lines) <= 14
        text = "\n".join("".join(part.text for part in line) for line in lines)
        assert "more trials" in text
        assert "best: trial 63" in text
        live.close()

    def test_it_redraws_five_times_a_second_at_most(
        self, live: Progress, stream: io.StringIO
    ) -> None:
        for step in range(1000):
            live.tick(step / 1000)
        drawings = stream.getvalue().count("busy ranks")
        live.close()
        assert 4 <= drawings <= 6

    def test_failures_and_rungs_stay_above_it(self, live: Progress, stream: io.StringIO) -> None:
        live.finished(failed(3), 1.0)
        live.finished(finished(4), 1.1)
        live.close()
        assert "error=ValueError: bad 3" in stream.getvalue()
        assert "trial=4" not in stream.getvalue()
        assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1
