"""Reading YAML: one line for each broken file, and values that are what was written."""

from __future__ import annotations

import pytest
import yaml

from mpihpo.errors import ExperimentError
from mpihpo.yaml_file import parse_yaml, read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ": empty; expected the keys of an experiment"),
        ("# nothing yet\n", ": empty; expected the keys of an experiment"),
        ("- a\n- b\n", ": a list at the top; expected the keys of an experiment"),
        ("train\n", ": 'train' at the top; expected the keys of an experiment"),
        ("a: 1\nb: 2\na: 3\n", ":3: not valid YAML: a is given twice, first in line 1"),
        ("a:\n  b: {c: 1, c: 2}\n", ":2: not valid YAML: c is given twice, first in line 2"),
        ("a: b: c\n", ":1: not valid YAML: mapping values are not allowed here"),
        (
            "a: 1\nb: [1\n",
            ":3: not valid YAML: while parsing a flow sequence "
            "expected ',' or ']', but got '<stream end>'",
        ),
        (
            "a: 1\n--- \nb: 2\n",
            ":2: not valid YAML: expected a single document in the stream "
            "but found another document",
        ),
        (
            "a: !!python/object:os.system x\n",
            ":1: not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system'",
        ),
        ("[" * 5000, ": nested too deeply for an experiment"),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path, text, line):
    path = tmp_path / "e.yaml"
    path.write_text(text)
    with pytest.raises(ExperimentError) as caught:
        read_yaml(path)
    assert str(caught.value) == f"{path}{line}"


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_bytes(b"train: \xff\n")
    with pytest.raises(
        ExperimentError, match=r"e\.yaml: not valid YAML: .*invalid start byte"
    ) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ExperimentError) as caught:
        read_yaml(tmp_path / "none.yaml")
    line = f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"
    assert str(caught.value) == line
    with pytest.raises(ExperimentError) as caught:
        read_yaml(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", float("inf")),
        ("1_000", 1000),
        ("0x1f", 31),
        ("-3", -3),
        ("010", "010"),
        ("1:30:00", "1:30:00"),
        ("2024-01-31", "2024-01-31"),
        ("'1e-4'", "1e-4"),
        ("e4", "e4"),
        ("1-12:00:00", "1-12:00:00"),
        ("true", True),
        ("~", None),
    ],
)
def test_scalars_are_what_was_written(text, value):
    parsed = parse_yaml(text, "")
    assert parsed == value
    assert type(parsed) is type(value)


def test_merged_mappings_are_not_repeated_keys():
    text = "base: &b {x: 1, y: 2}\ndeep: {m: &m {<<: *b, x: 3}}\nlast: {<<: *m, y: 4}\n"
    assert parse_yaml(text, "")["deep"]["m"] == {"x": 3, "y": 2}
    assert parse_yaml(text, "") == yaml.safe_load(text)


def test_written_yaml_reads_the_same_here_and_with_plain_pyyaml():
    shared = [1, 2]
    mapping = {
        "text": [
            "1e-4",
            "12:30",
            "no",
            "010",
            "2024-01-01",
            "",
            "x: y",
            "~",
            "0x1F",
            "1.",
            "Größe",
        ],
        "values": [1e-05, 1e300, -3, True, None, 0.1, float("inf")],
        "first": shared,
        "second": shared,
    }
    text = write_yaml(mapping)
    assert parse_yaml(text, "") == yaml.safe_load(text) == mapping
    assert "&" not in text
    assert list(parse_yaml(text, "")) == list(mapping)
