"""The journal: what is appended comes back, whatever happens to the file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpihpo.errors import InternalError, ResultsError
from mpihpo.records import RungResult, TrialRecord
from mpihpo.results.encoding import format_ranks, from_json, parse_ranks, runs_of, to_json
from mpihpo.results.entries import (
    Provenance,
    decode_experiment,
    decode_outcome,
    decode_rung,
    decode_start,
    decode_trial,
    encode_experiment,
    encode_outcome,
    encode_rung,
    encode_start,
    encode_trial,
)
from mpihpo.results.journal import Journal, read_journal

from .conftest import OUTCOMES

SCALARS = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.none()
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of five entries: numbers 0 to 4 with squares."""
    path = tmp_path / "journal.jsonl"
    with Journal(path, clock=lambda: 1000.25) as journal:
        for number in range(5):
            assert journal.append("square", root=number, square=number**2) == number
    return path


def test_entries_come_back_with_number_time_and_kind(path: Path) -> None:
    content = read_journal(path)
    assert content.problem is None
    assert content.entries[3] == {
        "seq": 3, "time": 1000.25, "kind": "square", "root": 3, "square": 9,
    }  # fmt: skip
    assert content.end == path.stat().st_size
    assert all("crc" in json.loads(line) for line in path.read_text().splitlines())


def test_lines_are_in_the_file_before_the_journal_is_closed(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("first")
        journal.sync()
        assert len(read_journal(tmp_path / "j").entries) == 1


def test_torn_last_line_is_left_out_and_cut_off_on_resume(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])
    content = read_journal(path)
    assert [entry["root"] for entry in content.entries] == [0, 1, 2, 3]
    assert content.problem == f"{path}: entries lost: 1 (line 5 is torn), kept: 4"
    with Journal(path, after=content) as journal:
        assert journal.append("square", root=9) == 4
    content = read_journal(path)
    assert content.problem is None
    assert [entry["root"] for entry in content.entries] == [0, 1, 2, 3, 9]


def test_every_flipped_byte_is_found_and_costs_only_its_lines(path: Path) -> None:
    whole = path.read_bytes()
    for position in range(len(whole)):
        for flip in (1, 32, 128):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            content = read_journal(path)
            assert content.problem is not None
            assert "\n" not in content.problem
            assert len(content.entries) >= 3
            assert all(entry["square"] == entry["root"] ** 2 for entry in content.entries)


def test_gap_and_repetition_are_told(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[3], lines[3], lines[4]]))
    content = read_journal(path)
    assert [entry["seq"] for entry in content.entries] == [0, 3, 4]
    assert content.problem == f"{path}: entries lost: 2 (line 3 repeats number 3), kept: 3"


def test_foreign_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("".join("hello\n" for _ in range(9)))
    content = read_journal(tmp_path / "j")
    assert content.entries == ()
    assert content.problem is not None
    assert "entries lost: 9 (line 1 is damaged; line 2" in content.problem
    assert "6 more" in content.problem
    (tmp_path / "j").write_text("")
    assert read_journal(tmp_path / "j").problem is None
    with pytest.raises(ResultsError, match="none: cannot be read"):
        read_journal(tmp_path / "none")


def test_an_existing_journal_is_not_overwritten(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="exists already"), Journal(path):
        pass
    assert len(read_journal(path).entries) == 5
    with pytest.raises(ResultsError, match="cannot be written"), Journal(tmp_path / "no" / "j"):
        pass


def test_a_refused_entry_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) - 10])

    with Journal(path, after=read_journal(path)) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(ResultsError, match="No space left"):
                journal.append("square", root=5)
        assert journal.append("square", root=5) == 5
    assert read_journal(path).problem is None


def test_reserved_names_and_odd_values_are_refused(path: Path) -> None:
    with Journal(path, after=read_journal(path)) as journal:
        with pytest.raises(InternalError):
            journal.append("x", crc=1)
        with pytest.raises(TypeError, match="a object cannot be kept"):
            journal.append("x", value=object())
    assert len(read_journal(path).entries) == 5


@given(st.dictionaries(st.text(), SCALARS))
def test_configurations_keep_values_and_types(config: dict[str, object]) -> None:
    trial = TrialRecord(id=3, config=config, seed=2**62 + 1)  # type: ignore[arg-type]
    again = decode_trial(from_json(to_json(encode_trial(trial))))
    assert again == trial
    assert [type(value) for value in again.config.values()] == list(map(type, config.values()))


def test_non_finite_floats_are_valid_json_and_differ_from_text() -> None:
    values = [math.inf, -math.inf, "nan", {"a": [math.inf, "inf"]}, {"float": 0.5}, {"float": "x"}]
    text = to_json(values)
    json.loads(text, parse_constant=pytest.fail)
    assert from_json(text) == values
    assert math.isnan(from_json(to_json({"loss": math.nan}))["loss"])


def test_numpy_scalars_become_plain_numbers() -> None:
    import numpy as np

    text = to_json({"a": np.float32(0.5), "b": np.int64(3), "c": np.float32("inf"), "d": (1, 2)})
    assert from_json(text) == {"a": 0.5, "b": 3, "c": math.inf, "d": [1, 2]}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_outcomes_and_starts_round_trip(outcome, tmp_path: Path) -> None:
    trial = outcome.allocation.evaluation.trial
    with Journal(tmp_path / "j") as journal:
        journal.append("trial", **encode_trial(trial))
        journal.append("start", **encode_start(outcome.allocation))
        journal.append("outcome", **encode_outcome(outcome))
    first, start, last = read_journal(tmp_path / "j").entries
    trials = {first["trial"]: decode_trial(first)}
    assert decode_start(start, trials) == outcome.allocation
    assert decode_outcome(last, trials) == outcome
    with pytest.raises(ResultsError, match="has no entry"):
        decode_outcome(last, {})


def test_rungs_and_provenance_round_trip() -> None:
    result = RungResult(rung=1, start=1, stop=2, evaluated=8, failed=1, promoted=(3, 1), best=None)
    assert decode_rung(from_json(to_json(encode_rung(result)))) == result
    provenance = Provenance(
        experiment_text="train: é\n", seed=1, versions={"torch": "2"}, nodes=("a", "a", "b", "a")
    )
    fields = from_json(to_json(encode_experiment(provenance)))
    assert decode_experiment(fields) == provenance
    assert fields["world_size"] == 4
    with pytest.raises(ResultsError, match="layout 99"):
        decode_experiment({**fields, "layout": 99})


@given(st.lists(st.integers(0, 30), unique=True))
def test_ranks_as_text_keep_their_order(ranks: list[int]) -> None:
    assert parse_ranks(format_ranks(ranks)) == tuple(ranks)
    assert sum(count for _, count in runs_of(ranks)) == len(ranks)


def test_ranks_as_text_are_short() -> None:
    assert format_ranks(range(24_576)) == "0-24575"
    assert format_ranks((3, 2, 4, 5)) == "3,2,4-5"
    assert format_ranks((0, 2, 1, 3)) == "0,2,1,3"


def test_a_journal_that_was_deleted_is_not_written_in_silence(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("trial", number=1)
        (tmp_path / "journal.jsonl").unlink()
        with pytest.raises(ResultsError, match="was deleted while the job wrote it"):
            journal.append("trial", number=2)
