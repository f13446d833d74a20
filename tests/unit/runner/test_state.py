"""Taking state apart and putting it together, with arrays alone: torch is not loaded here."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest

from mpihpo.errors import StateError
from mpihpo.runner import state as states
from mpihpo.runner.state import GENERATORS, Keeper, KeptState, Part

Pair = namedtuple("Pair", ["first", "second"])


class Counter:
    """An own class with state, as a user may attach."""

    def __init__(self) -> None:
        self.values = np.zeros(3)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.steps = state["values"], state["steps"]


def sent(part: Part) -> Part:
    """The part as another rank receives it: its skeleton, and the bytes of its leaves."""
    received = states.empty_like(part.skeleton)
    for target, source in zip(received.leaves, part.leaves, strict=True):
        states.as_bytes(target)[:] = states.as_bytes(source)
    return received


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tolist() == other.tolist()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "tree",
    [
        np.arange(6.0).reshape(2, 3),
        np.float32(2.5),
        {"a": np.zeros((2, 0)), "b": [np.array(7), (np.array([True, False]), None)]},
        {"state": {0: {"step": 3, "exp_avg": np.ones(4, np.float32)}}, "param_groups": [{"lr": 1}]},
        OrderedDict(z=np.arange(3), a="text"),
        Pair(np.arange(2), {"deep": [np.arange(4).astype(">f8")]}),
        {"complex": np.array([1 + 2j]), "text": np.array(["a", "bcd"]), "half": np.float16([1.5])},
        {"dates": np.array(["2026-01-01"], dtype="datetime64[D]"), "bytes": np.array([b"xy"])},
        {"fields": np.array([(1, 2.5)], dtype=[("count", "i4"), ("mean", "f8")])},
        {"objects": np.array([None, "x"], dtype=object), "empty text": np.array([""])},
        {"no text at all": np.empty(2, dtype="S0")},
        [],
        {},
        (),
        None,
        5,
    ],
    ids=repr,
)
@pytest.mark.parametrize("copy", [True, False])
def test_a_tree_comes_back_as_it_was_on_another_rank(tree: Any, copy: bool) -> None:
    part = states.take_tree(tree, copy=copy)
    assert equal(part.tree(), tree)
    assert equal(sent(part).tree(), tree)


def test_a_mapping_that_cannot_be_built_from_one_becomes_plain() -> None:
    tree = defaultdict(list, {"a": np.arange(3)})
    back = states.take_tree(tree, copy=True).tree()
    assert dict(back).keys() == {"a"}
    assert back["a"].tolist() == [0, 1, 2]


def test_arrays_that_are_not_contiguous_are_kept_by_value() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    for view in (whole.T, whole[:, ::2], whole[::-1], np.asfortranarray(whole)):
        part = states.take_tree({"view": view}, copy=True)
        assert equal(sent(part).tree()["view"], np.ascontiguousarray(view))


def test_a_copy_shares_no_memory() -> None:
    counter = Counter()
    part = states.take(counter, copy=True)
    counter.values += 1
    assert part.tree()["values"].tolist() == [0, 0, 0]


def test_nbytes_counts_everything() -> None:
    part = states.take_tree(
        {"a": np.zeros(3, np.float32), "b": [np.zeros((2, 2))], "c": 1}, copy=True
    )
    assert part.nbytes == 3 * 4 + 4 * 8
    whole = part.nbytes + len(part.skeleton)
    assert KeptState(1, 1, {"x": part, "y": part}).nbytes == 2 * whole
    assert KeptState(1, 1, {"x": states.take_tree({"c": 1}, copy=True)}).nbytes > 0
    assert KeptState(1, 1, {}).nbytes == 0


class TestPutBack:
    def test_an_array_is_restored_in_place(self) -> None:
        part = states.take(np.arange(3.0), copy=True)
        given = np.zeros(3)
        alias = given
        states.put_back("weights", given, part)
        assert alias.tolist() == [0, 1, 2]

    def test_an_object_loads_its_state(self) -> None:
        first, second = Counter(), Counter()
        first.values, first.steps = np.array([1.0, 2.0]), 7
        states.put_back("counter", second, sent(states.take(first, copy=True)))
        assert (second.values.tolist(), second.steps) == ([1.0, 2.0], 7)

    @pytest.mark.parametrize("given", [np.zeros(4), np.zeros((3, 1)), np.zeros(3, np.float32)])
    def test_an_array_of_another_kind_is_refused(self, given: np.ndarray[Any, Any]) -> None:
        part = states.take(np.zeros(3), copy=True)
        told = r"attach\(weights=...\): the kept state does not fit: kept float64 of shape \(3,\)"
        with pytest.raises(StateError, match=told):
            states.put_back("weights", given, part)

    def test_what_loading_raises_is_told_in_one_line(self) -> None:
        class Picky(Counter):
            def load_state_dict(self, state: dict[str, Any]) -> None:
                raise KeyError("missing\n   key")

        with pytest.raises(StateError) as caught:
            states.put_back("picky", Picky(), states.take(Picky(), copy=True))
        assert "attach(picky=...)" in str(caught.value)
        assert "\n" not in str(caught.value)


class TestAttachable:
    @pytest.mark.parametrize("thing", [np.zeros(2), Counter()])
    def test_accepted(self, thing: object) -> None:
        states.check_attachable("thing", thing)

    @pytest.mark.parametrize("thing", [3, "text", None, [np.zeros(2)], object()])
    def test_refused_with_what_would_be_right(self, thing: object) -> None:
        told = f"{type(thing).__name__} has no state_dict and load_state_dict; expected"
        with pytest.raises(StateError, match=told):
            states.check_attachable("thing", thing)

    def test_the_name_of_the_generators_is_taken(self) -> None:
        with pytest.raises(StateError, match="taken"):
            states.check_attachable(GENERATORS, Counter())


def test_generators_continue_where_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    part = sent(states.take_generators())
    expected = random.random(), np.random.random()
    random.seed(2)
    np.random.seed(2)
    states.put_back_generators(part)
    assert (random.random(), np.random.random()) == expected


class TestFingerprint:
    def kept(self, **changes: Any) -> KeptState:
        tree = {"values": changes.pop("values", np.arange(3.0)), "steps": changes.pop("steps", 4)}
        part = states.take_tree(tree, copy=True)
        identity = {"trial_id": 3, "epoch": 2, **changes}
        return KeptState(parts={"counter": part}, **identity)

    def test_equal_for_what_another_rank_received(self) -> None:
        kept = self.kept()
        received = {name: sent(part) for name, part in kept.parts.items()}
        assert KeptState(3, 2, received).fingerprint == kept.fingerprint

    @pytest.mark.parametrize(
        "change",
        [{"values": np.array([0.0, 1.0, 2.5])}, {"steps": 5}, {"epoch": 3}, {"trial_id": 4}],
        ids=str,
    )
    def test_differs_for_a_difference_anywhere(self, change: dict[str, Any]) -> None:
        assert self.kept(**change).fingerprint != self.kept().fingerprint

    def test_does_not_depend_on_the_order_of_the_parts(self) -> None:
        one, two = (states.take(np.full(2, value), copy=True) for value in (1.0, 2.0))
        first = KeptState(0, 1, {"a": one, "b": two})
        assert first.fingerprint == KeptState(0, 1, {"b": two, "a": one}).fingerprint
        assert first.fingerprint != KeptState(0, 1, {"a": two, "b": one}).fingerprint


def test_leaves_are_walked_in_the_same_order_on_all_ranks() -> None:
    one, two = (states.take(np.full(1, value), copy=True) for value in (1.0, 2.0))
    for parts in ({"a": one, "b": two}, {"b": two, "a": one}):
        assert [leaf.item() for leaf in states.walk(parts)] == [1.0, 2.0]


class TestKeeper:
    @pytest.fixture
    def keeper(self) -> Keeper:
        keeper = Keeper()
        for trial, epoch in ((1, 1), (1, 2), (1, 4), (2, 1)):
            keeper.put(KeptState(trial, epoch, {"x": states.take(np.zeros(2), copy=True)}))
        return keeper

    def held(self, keeper: Keeper) -> list[tuple[int, int]]:
        pairs = ((trial, epoch) for trial in (1, 2, 3) for epoch in (1, 2, 4))
        return [pair for pair in pairs if keeper.get(*pair) is not None]

    @pytest.mark.parametrize(
        ("order", "left"),
        [
            ({}, [(2, 1)]),
            ({"before": 1}, [(1, 1), (1, 2), (1, 4), (2, 1)]),
            ({"before": 2}, [(1, 2), (1, 4), (2, 1)]),
            ({"before": 4}, [(1, 4), (2, 1)]),
            ({"before": 9}, [(2, 1)]),
            ({"epoch": 2}, [(1, 1), (1, 4), (2, 1)]),
            ({"epoch": 3}, [(1, 1), (1, 2), (1, 4), (2, 1)]),
            ({"before": 4, "epoch": 2}, [(1, 1), (1, 4), (2, 1)]),
            ({"before": 2, "epoch": 2}, [(1, 1), (1, 2), (1, 4), (2, 1)]),
        ],
    )
    def test_forgets_what_it_is_told_to(
        self, keeper: Keeper, order: dict[str, int], left: list[tuple[int, int]]
    ) -> None:
        keeper.forget(1, **order)
        assert self.held(keeper) == left
        assert len(keeper) == len(left)
        each = keeper.get(*left[0]).nbytes if left else 0
        assert keeper.nbytes == each * len(left)

    def test_forgetting_a_trial_that_is_not_here_does_nothing(self, keeper: Keeper) -> None:
        keeper.forget(3)
        keeper.forget(3, before=2)
        assert len(keeper) == 4

    def test_a_state_of_the_same_epoch_replaces_the_earlier_one(self, keeper: Keeper) -> None:
        newer = KeptState(2, 1, {})
        keeper.put(newer)
        assert keeper.get(2, 1) is newer
        assert len(keeper) == 4
