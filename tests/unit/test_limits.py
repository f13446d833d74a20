"""The section ``limits``: durations and sizes, what is refused with which line, the way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpihpo.errors import ExperimentError
from mpihpo.limits import Limits, parse_duration, parse_size

DURATION = "is not possible; expected seconds, or text such as 90s, 1h30m, 02:00:00 or 1-12:00:00"
KEYS = "time, trial_seconds, grace_seconds, heartbeat_seconds, retries, state_bytes"
SIZE = "is not possible; expected bytes, or text such as 500MB, 1.5TB or 64GiB"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90),
        (0.5, 0.5),
        ("90", 90),
        ("1e3", 1000),
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1d", 86400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1d 2h 3m 4s", 93784),
        ("02:00:00", 7200),
        ("1:30:05", 5405),
        ("100:00:00", 360000),
        ("1-12:00:00", 129600),
    ],
)
def test_durations(value, seconds):
    assert parse_duration(value, "limits.time") == seconds


@pytest.mark.parametrize(
    "value",
    ["", "soon", "0s", 0, "-5", -5, "1:30", "1:60:00", "30m2h", "2 hours", "h", True, [1], "nan"],
)
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(ExperimentError) as caught:
        parse_duration(value, "limits.time")
    assert str(caught.value) == f"limits.time: {value!r} {DURATION}"


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (1.5e9, 1_500_000_000),
        ("1000", 1000),
        ("1e12", 10**12),
        ("12B", 12),
        ("3kB", 3000),
        ("500MB", 500_000_000),
        ("200GB", 200 * 10**9),
        ("1.5 TB", 1_500_000_000_000),
        ("2KiB", 2048),
        ("1MiB", 2**20),
        ("64GiB", 64 * 2**30),
        ("0.5TiB", 2**39),
    ],
)
def test_sizes(value, size):
    parsed = parse_size(value, "limits.state_bytes")
    assert parsed == size
    assert isinstance(parsed, int)


@pytest.mark.parametrize(
    "value",
    ["", "GB", "much", "200 gigabytes", "200gb", "64Gib", "5K", "-1GB", "nan", "inf", "0GB"],
)
def test_what_is_no_size_is_refused(value):
    check_no_size(value)


@pytest.mark.parametrize("value", [-1, 0, 0.5, True, None, [1], float("inf")])
def test_what_is_neither_number_nor_text_of_a_size_is_refused(value):
    check_no_size(value)


def check_no_size(value):
    with pytest.raises(ExperimentError) as caught:
        parse_size(value, "limits.state_bytes")
    assert str(caught.value) == f"limits.state_bytes: {value!r} {SIZE}"


@pytest.mark.parametrize(("parse", "text"), [(parse_duration, "h"), (parse_size, "GB")])
@pytest.mark.parametrize("digits", [308, 309, 400])
def test_numbers_beyond_all_bounds_are_refused_too(parse, text, digits):
    with pytest.raises(ExperimentError, match=r"limits\.x: '999+\.\.\. is not possible"):
        parse("9" * digits + text, "limits.x")


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"time": "soon"}, f"limits.time: 'soon' {DURATION}"),
        ({"trial_seconds": 0}, f"limits.trial_seconds: 0 {DURATION}"),
        ({"grace_seconds": "-1s"}, f"limits.grace_seconds: '-1s' {DURATION}"),
        ({"grace_seconds": None}, f"limits.grace_seconds: None {DURATION}"),
        ({"heartbeat_seconds": [5]}, f"limits.heartbeat_seconds: [5] {DURATION}"),
        ({"state_bytes": "200gb"}, f"limits.state_bytes: '200gb' {SIZE}"),
        (
            {"retries": -1},
            "limits.retries: -1 is not possible; expected a whole number of at least 0",
        ),
        (
            {"state_byte": 1},
            f"limits.state_byte: unknown key; did you mean state_bytes? known keys: {KEYS}",
        ),
        ([1], f"limits: [1] is not a section; expected keys: {KEYS}"),
    ],
)
def test_wrong_limits_are_refused_in_one_line(section, line):
    with pytest.raises(ExperimentError) as caught:
        Limits.from_mapping(section)
    assert str(caught.value) == line


def test_defaults():
    assert Limits.from_mapping(None) == Limits.from_mapping({}) == Limits()
    assert (Limits().grace_seconds, Limits().heartbeat_seconds) == (60.0, 300.0)
    assert Limits.from_mapping(dict.fromkeys(("time", "trial_seconds", "state_bytes"))) == Limits()
    assert Limits().to_mapping() == {}


def test_texts_become_numbers():
    limits = Limits.from_mapping(
        {"time": "2h", "trial_seconds": "30m", "grace_seconds": "1m30s", "state_bytes": "200GB"}
    )
    assert limits == Limits(
        time_seconds=7200.0, trial_seconds=1800.0, grace_seconds=90.0, state_bytes=200 * 10**9
    )
    assert limits.to_mapping() == {
        "time": 7200.0,
        "trial_seconds": 1800.0,
        "grace_seconds": 90.0,
        "state_bytes": 200 * 10**9,
    }


durations = st.one_of(st.floats(0.001, 1e9), st.sampled_from(["90s", "1h30m", "1-12:00:00"]))


@given(
    section=st.fixed_dictionaries(
        {},
        optional={
            "time": durations,
            "trial_seconds": durations,
            "grace_seconds": st.one_of(durations, st.just(60)),
            "heartbeat_seconds": durations,
            "retries": st.integers(0, 9),
            "state_bytes": st.one_of(st.integers(1, 2**60), st.sampled_from(["1.5TB", "64GiB"])),
        },
    )
)
def test_limits_round_trip(section):
    limits = Limits.from_mapping(section)
    assert Limits.from_mapping(limits.to_mapping()) == limits
