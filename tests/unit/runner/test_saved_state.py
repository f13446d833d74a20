"""States on disk, with arrays alone: torch is not loaded here."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpihpo.errors import CheckpointError, StateError
from mpihpo.runner import saved_state
from mpihpo.runner.saved_state import (
    read_state,
    remove_partial,
    saved_states,
    state_path,
    write_state,
)
from mpihpo.runner.state import KeptState, take_tree

Pair = namedtuple("Pair", ["first", "second"])


def kept(trial_id: int = 3, epoch: int = 4, **trees: Any) -> KeptState:
    parts = {name: take_tree(tree, copy=True) for name, tree in trees.items()}
    return KeptState(trial_id, epoch, parts)


def trees_of(state: KeptState) -> dict[str, Any]:
    return {name: part.tree() for name, part in state.parts.items()}


def assert_same(found: Any, expected: Any) -> None:
    """Equal to the bit, in type and in value."""
    assert type(found) is type(expected)
    if isinstance(expected, (np.ndarray, np.generic)):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
        for mine, other in zip(found, expected, strict=True):
            assert_same(mine, other)
        assert_same(getattr(found, "_metadata", None), getattr(expected, "_metadata", None))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert_same(mine, other)
    else:
        assert repr(found) == repr(expected)  # nan is nan, and -0.0 is not 0.0


def with_metadata() -> OrderedDict[str, Any]:
    ordered: OrderedDict[str, Any] = OrderedDict(weight=np.arange(6.0).reshape(2, 3), bias=None)
    ordered._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return ordered


EXAMPLES: dict[str, Any] = {
    "integer keys": {0: {"step": 3, "exp": np.ones(2)}, 1: {}, -(2**70): "big"},
    "other keys": {(1, "a"): 1, None: 2, True: 3, b"\x00": 4, 2.5: 5},
    "OrderedDict": with_metadata(),
    "tuples": ((), (1, (2.0, [3, ()])), []),
    "plain": [None, True, False, 0, 1.5, "text", "", "\udc80\u00e9\n"],
    "odd floats": [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 0.1 + 0.2],
    "bytes": [b"", bytes(range(256))],
    "empty": {"a": {}, "b": [], "c": (), "d": OrderedDict(), "e": [[], [{}]]},
    "numpy scalars": [
        *(np.float16(1.5), np.float32(0.1), np.float64(0.1), np.longdouble(0.1)),
        *(np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 - 2j)),
        *(np.str_("abc"), np.bytes_(b"xy"), np.datetime64("2020-01-02")),
    ],
    "arrays": [
        *(np.float16([1, np.nan]), np.array([True, False]), np.array(3.5), np.array(7, "i1")),
        *(np.zeros(0), np.zeros((3, 0, 2), "f4"), np.arange(6, dtype=">i4").reshape(2, 3)),
        *(np.array(["ab", "c"]), np.array([1 + 2j]), np.asfortranarray(np.eye(3)[:, :2])),
    ],
    "alone": np.arange(3),
    "none": None,
    "looks like a tag": [["leaf", [0, True, "float32", [1]]], ["dict", []], ["tuple", [1]]],
}


@pytest.mark.parametrize("tree", EXAMPLES.values(), ids=list(EXAMPLES))
def test_a_round_trip_is_exact(tmp_path: Path, tree: Any):
    state = kept(thing=tree, other={"x": np.ones(1)})
    write_state(tmp_path, state)
    found = read_state(tmp_path, 3, 4)
    assert (found.trial_id, found.epoch) == (3, 4)
    for name, expected in trees_of(state).items():
        assert_same(found.parts[name].tree(), expected)
    assert_same(found.parts["thing"].tree(), take_tree(tree, copy=True).tree())


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | hnp.arrays(
        st.sampled_from(["f2", "f4", "f8", "i1", "u8", "?", "c8"]), hnp.array_shapes(min_dims=0)
    )
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(trees, trees)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, first: Any, second: Any):
    folder = tmp_path_factory.mktemp("states")
    state = kept(first=first, second=second)
    write_state(folder, state)
    found = read_state(folder, 3, 4)
    assert list(found.parts) == ["first", "second"]
    for name, expected in trees_of(state).items():
        assert_same(found.parts[name].tree(), expected)
    for part, other in zip(found.parts.values(), state.parts.values(), strict=True):
        assert_same(part.leaves, other.leaves)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("damaged")
    tree = {"w": np.arange(50.0), "b": np.ones(3, "f2"), "steps": 12, "name": "adam"}
    state = kept(model=tree, empty=np.zeros(0))
    path = write_state(folder, state)
    return folder, path.read_bytes(), trees_of(state)


@settings(max_examples=400, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
def test_a_flipped_byte_never_gives_wrong_data(
    written: tuple[Path, bytes, dict[str, Any]], position: float, bits: int
):
    folder, content, expected = written
    damaged = bytearray(content)
    damaged[int(position * len(content))] ^= bits
    state_path(folder, 3, 4).write_bytes(damaged)
    check_damaged(folder, expected)


def test_every_byte_of_the_archives_own_fields(written: tuple[Path, bytes, dict[str, Any]]):
    """Directory and member headers, where a flip turns up as an error of any kind."""
    folder, content, expected = written
    start = content.index(b"PK\x01\x02")
    places = [*range(start, len(content)), *range(60)]
    for place in places:
        for bits in (0x08, 0xFF):
            damaged = bytearray(content)
            damaged[place] ^= bits
            state_path(folder, 3, 4).write_bytes(damaged)
            check_damaged(folder, expected)


def check_damaged(folder: Path, expected: dict[str, Any]) -> None:
    """Refused; or read, where the byte means nothing (a date, say), and then all of it right."""
    try:
        found = read_state(folder, 3, 4)
    except CheckpointError as error:
        text = str(error)
    else:
        assert_same(trees_of(found), expected)
        return
    assert str(state_path(folder, 3, 4)) in text
    assert "\n" not in text


def test_most_flips_are_seen(written: tuple[Path, bytes, dict[str, Any]]):
    folder, content, _ = written
    begin = content.index(np.arange(50.0).tobytes())
    for place in range(begin, begin + 400, 7):
        damaged = bytearray(content)
        damaged[place] ^= 1
        state_path(folder, 3, 4).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            read_state(folder, 3, 4)


def test_a_truncated_file_is_refused(written: tuple[Path, bytes, dict[str, Any]]):
    folder, content, _ = written
    for length in (*range(0, len(content), 97), len(content) - 1):
        state_path(folder, 3, 4).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            read_state(folder, 3, 4)


def test_a_state_of_another_trial_or_epoch_is_refused(tmp_path: Path):
    path = write_state(tmp_path, kept(3, 4, a=np.ones(2)))
    for trial_id, epoch in ((2, 4), (3, 5)):
        path.rename(state_path(tmp_path, trial_id, epoch))
        path = state_path(tmp_path, trial_id, epoch)
        message = f"holds trial 3 after epoch 4, expected trial {trial_id} after epoch {epoch}"
        with pytest.raises(CheckpointError, match=message):
            read_state(tmp_path, trial_id, epoch)


def test_a_missing_file_is_told(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"trial-1-epoch-2\.npz: is not there"):
        read_state(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match="is not there"):
        read_state(tmp_path / "nowhere", 1, 2)


def test_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saved_state, "LAYOUT", 7)
    write_state(tmp_path, kept(a=np.ones(2)))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has layout 7, expected 1"):
        read_state(tmp_path, 3, 4)


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"a": {1, 2}}, "set"),
        ([object()], "object"),
        (Pair(1, np.ones(1)), "Pair"),
        ({"f": np.array([object()])}, "ndarray"),
        ([1 + 2j], "complex"),
    ],
)
def test_what_cannot_be_saved_is_named(
    tmp_path: Path, tree: Any, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mpihpo.runner.state.pickle.dumps", lambda tree: tree)
    monkeypatch.setattr(saved_state.pickle, "loads", lambda tree: tree)
    with pytest.raises(StateError, match=rf"attach\(model=\.\.\.\).* holds a {kind}, which cannot"):
        write_state(tmp_path, kept(model=tree))
    assert list(tmp_path.iterdir()) == []


def test_nothing_from_the_disk_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = kept(model=EXAMPLES["OrderedDict"], other=EXAMPLES["plain"])
    path = write_state(tmp_path, state)
    written, read = [], []
    real_dumps, real_loads = pickle.dumps, pickle.loads

    def dumps(thing: Any) -> bytes:
        written.append(real_dumps(thing))
        return written[-1]

    def loads(content: bytes) -> Any:
        read.append(content)
        return real_loads(content)

    monkeypatch.setattr(pickle, "dumps", dumps)
    monkeypatch.setattr(pickle, "loads", loads)
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("unpickled a file"))
    read_state(tmp_path, 3, 4)
    assert set(read) <= set(written)  # only what was pickled in memory just before
    # An array of objects, as an attacker would put it there, is refused.
    with path.open("wb") as file:
        np.savez(file, header=np.array([{"layout": 1}], dtype=object))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_state(tmp_path, 3, 4)
    path.write_bytes(real_dumps({"layout": 1}))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_state(tmp_path, 3, 4)


def test_an_array_of_the_wrong_size_is_refused(tmp_path: Path):
    path = write_state(tmp_path, kept(a=np.ones(4)))
    with np.load(path) as archive:
        members = dict(archive)
    members["0-0"] = members["0-0"][:-1]
    np.savez(path, **members)
    with pytest.raises(CheckpointError, match="array 0-0 has 31 bytes"):
        read_state(tmp_path, 3, 4)
    del members["0-0"]
    np.savez(path, **members)
    with pytest.raises(CheckpointError, match="is damaged: KeyError"):
        read_state(tmp_path, 3, 4)
    assert zipfile.is_zipfile(path)


@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace", "numpy.savez"])
def test_what_was_there_survives_a_failure(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
):
    write_state(tmp_path, kept(a=np.zeros(2)))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failing, full)
    with pytest.raises(OSError, match="No space left"):
        write_state(tmp_path, kept(a=np.ones(2)))
    monkeypatch.undo()
    assert_same(read_state(tmp_path, 3, 4).parts["a"].tree(), np.zeros(2))
    assert [path.name for path in tmp_path.iterdir()] == ["trial-3-epoch-4.npz"]


def test_a_killed_process_leaves_the_old_state(tmp_path: Path):
    write_state(tmp_path, kept(a=np.zeros(2)))
    half = tmp_path / ".trial-3-epoch-4.npz.4711"
    half.write_bytes(b"PK")
    other = tmp_path / "best.pt"
    other.touch()
    assert list(saved_states(tmp_path)) == [(3, 4)]
    remove_partial(tmp_path)
    assert not half.exists()
    assert other.exists()
    assert_same(read_state(tmp_path, 3, 4).parts["a"].tree(), np.zeros(2))


def test_states_are_found_by_name(tmp_path: Path):
    assert list(saved_states(tmp_path / "nowhere")) == []
    for trial_id, epoch in ((0, 2), (12, 16)):
        write_state(tmp_path, kept(trial_id, epoch, a=np.ones(1)))
    (tmp_path / "trial-x-epoch-1.npz").touch()
    (tmp_path / "trial-1-epoch-1.npz.bak").touch()
    assert sorted(saved_states(tmp_path)) == [(0, 2), (12, 16)]
