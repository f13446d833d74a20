"""Checks that every settings class shares: plain mappings in, one clear ExperimentError out.

Knows no section of the experiment by name: each caller passes the dotted key that it is checking.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from mpihpo.errors import ExperimentError

T = TypeVar("T")


def show(value: object) -> str:
    """The value as one short line for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def check_keys(mapping: object, known: Iterable[str], where: str) -> None:
    """Refuse what is no mapping and the first key that is not one of ``known``.

    Raises:
        ExperimentError: Names the key, a close match and the known keys.
    """
    known = list(known)
    if not isinstance(mapping, Mapping):
        problem = f"{show(mapping)} is not a section; expected keys: {', '.join(known)}"
        raise ExperimentError(where, problem)
    for key in mapping:
        if key not in known:
            dotted = f"{where}.{key}" if where else str(key)
            raise ExperimentError(dotted, f"unknown key; {advise(key, known, 'known keys')}")


def advise(name: object, known: Iterable[str], title: str) -> str:
    """The known names, after the one that was probably meant."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}{title}: {', '.join(known)}"


def from_mapping(cls: type[T], mapping: object, where: str) -> T:
    """Build the dataclass ``cls`` from a section whose keys are the names of its fields.

    An empty section (None, as YAML gives it) has all defaults.

    Raises:
        ExperimentError: A key is unknown or missing, or ``cls`` refuses a value.
    """
    mapping = {} if mapping is None else mapping
    declared = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    check_keys(mapping, declared, where)
    assert isinstance(mapping, Mapping)
    for name, field in declared.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in mapping:
            dotted = f"{where}.{name}" if where else name
            raise ExperimentError(dotted, "missing; it has no default")
    return cls(**mapping)


def to_mapping(settings: object) -> dict[str, Any]:
    """The section that gives these settings: their fields, without those that are None."""
    named = {field.name: getattr(settings, field.name) for field in fields(settings)}  # type: ignore[arg-type]
    return {name: value for name, value in named.items() if value is not None}


def accept_mapping(
    owner: object, name: str, cls: type[T], build: Callable[[object], T] | None = None
) -> None:
    """Replace field ``name`` of a frozen dataclass by a ``cls`` built of it, unless it is one."""
    value = getattr(owner, name)
    if not isinstance(value, cls):
        built = from_mapping(cls, value, name) if build is None else build(value)
        object.__setattr__(owner, name, built)


def check_integer(value: object, where: str, *, least: int) -> None:
    """Refuse all but whole numbers from ``least`` to 2**63 - 1; a boolean is no number."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ExperimentError(
            where, f"{show(value)} is not possible; expected a whole number of at least {least}"
        )


def check_text(value: object, where: str, expected: str) -> None:
    """Refuse what is no text, or an empty one."""
    if not isinstance(value, str) or not value:
        raise ExperimentError(where, f"{show(value)} is not possible; expected {expected}")


def check_choice(value: object, choices: Iterable[str], where: str) -> None:
    """Refuse what is not one of ``choices``."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        advice = advise(value, choices, "expected one of")
        raise ExperimentError(where, f"{show(value)} is not possible; {advice}")


def as_number(value: object) -> float | int | None:
    """A finite number, or text that YAML 1.1 did not take for one, such as ``1e-4``; else None."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def load_class(name: object, built_in: Mapping[str, type[T]], where: str) -> type[T]:
    """The class of a built-in name, or the one that ``package.module:Name`` names.

    Raises:
        ExperimentError: Lists the built-in names, or says why the import failed.
    """
    if isinstance(name, str) and name in built_in:
        return built_in[name]
    if not isinstance(name, str) or ":" not in name:
        raise ExperimentError(
            where,
            f"there is no {show(name)}; {advise(name, built_in, 'available')}, "
            "or your own as package.module:Name",
        )
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ExperimentError(where, f"{name!r} cannot be imported: {reason}") from error
    if not isinstance(found, type):
        raise ExperimentError(where, f"{name!r} is not a class")
    return found
