"""The error tree: drawn completely, and every error survives the way between ranks."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from mpihpo import errors
from mpihpo.errors import ExperimentError, MpihpoError, SpaceError

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
]


def example(cls):
    if issubclass(cls, ExperimentError):
        return cls("schedule.max_epochs", "0 is not possible; expected at least 1")
    return cls("something went wrong")


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(cls, protocol):
    error = example(cls)
    for copied in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(copied) is cls
        assert copied.args == error.args
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_say_what_happened(cls):
    assert cls.__doc__
    assert "\n" not in str(example(cls))


def test_where_starts_the_message():
    error = SpaceError("search.space.lr.lower", "0 is not above 0")
    assert str(error) == "search.space.lr.lower: 0 is not above 0"
    assert (error.where, error.problem) == ("search.space.lr.lower", "0 is not above 0")
    assert str(ExperimentError("", "empty")) == "empty"


def drawn():
    """Of each class in the drawn tree, its parent there and the builtin that it names."""
    parents = {}
    above = {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"([ │├└─]+)([A-Z]\w+)(?:\((\w+)\))?(?=\s{2,})", line)
        if match:
            depth = len(match[1])
            above = {other: name for other, name in above.items() if other < depth}
            parents[match[2]] = (above[max(above)] if above else None, match[3])
            above[depth] = match[2]
    return parents


def test_the_drawn_tree_is_the_tree():
    tree = drawn()
    assert set(tree) == {cls.__name__ for cls in CLASSES}
    for cls in CLASSES:
        parent, builtin = tree[cls.__name__]
        bases = [base.__name__ for base in cls.__bases__]
        assert bases == [name for name in (parent, builtin) if name] or cls is MpihpoError


def test_what_interrupts_training_passes_by_except_exception():
    outside = {cls for cls in CLASSES if not issubclass(cls, Exception)}
    assert outside == {errors.GroupAborted}
    assert all(issubclass(cls, MpihpoError) for cls in set(CLASSES) - outside)
