"""The domains of a search space: what one hyper-parameter may be.

A domain is a frozen value that maps a fraction of [0, 1) to a value, so that whoever draws the
fractions (a generator, a grid, a quasi-random sequence) decides, and the domain does not. Its
errors name the key inside the domain; the space puts the domain's name before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpihpo.errors import SpaceError
from mpihpo.records import Scalar
from mpihpo.settings import as_number, check_keys, show

Condition = tuple[tuple[str, tuple[Scalar, ...]], ...]
"""Names of other dimensions and the values they may have; all have to hold."""

MAX_STEPS = 100_000
MAX_INTEGER = 2**53


def same(left: Scalar, right: Scalar) -> bool:
    """Equality that keeps ``true`` apart from 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def contains(values: Iterable[Scalar], value: Scalar) -> bool:
    """Whether one of ``values`` is the same as ``value``."""
    return any(same(other, value) for other in values)


def _scalar(value: object, key: str) -> Scalar:
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        # A subclass, such as NumPy's float64, becomes plain: YAML and JSON know only plain ones.
        if isinstance(value, kind) and (kind is not float or math.isfinite(float(value))):
            return kind(value)
    expected = "expected a finite number, a text, true, false or null"
    raise SpaceError(key, f"{show(value)} is not possible; {expected}")


def _condition(when: object) -> Condition:
    if isinstance(when, tuple):
        when = dict(when)
    if not isinstance(when, Mapping) or not all(isinstance(name, str) for name in when):
        raise SpaceError("when", f"{show(when)} is not possible; expected {{other: value}}")
    pairs = []
    for name, given in when.items():
        listed = given if isinstance(given, (list, tuple)) else (given,)
        values = tuple(_scalar(value, f"when.{name}") for value in listed)
        if not values:
            raise SpaceError(f"when.{name}", "an empty list never holds; expected a value")
        pairs.append((name, values))
    return tuple(pairs)


def _when_to_mapping(when: Condition) -> dict[str, Any]:
    plain = {name: values[0] if len(values) == 1 else list(values) for name, values in when}
    return {"when": plain} if plain else {}


def _between(fraction: float, lower: float, upper: float, *, log: bool) -> float:
    if log:
        value = math.exp((1 - fraction) * math.log(lower) + fraction * math.log(upper))
    else:
        value = (1 - fraction) * lower + fraction * upper
    return min(max(value, lower), upper)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """What the domains with two bounds share; both bounds belong to the domain."""

    lower: float
    upper: float
    steps: int | None = None
    """How many points a grid takes, both bounds among them; other searchers do not ask."""
    when: Condition = ()
    """The dimension exists only where this holds; a mapping is accepted."""

    def _check(self, *, log: bool, whole: bool) -> None:
        for key in ("lower", "upper"):
            value = getattr(self, key)
            number = as_number(value)
            if number is None:
                raise SpaceError(key, f"{show(value)} is not possible; expected a finite number")
            if whole and (number != int(number) or abs(number) > MAX_INTEGER):
                expected = "expected a whole number (up to 2**53), because of integer: true"
                raise SpaceError(key, f"{show(value)} is not possible; {expected}")
            object.__setattr__(self, key, int(number) if whole else float(number))
        if log and self.lower <= 0:
            expected = "expected a number above 0, because of log: true"
            raise SpaceError("lower", f"{self.lower} is not possible; {expected}")
        if self.lower >= self.upper:
            raise SpaceError("lower", f"{self.lower} is not below upper, which is {self.upper}")
        steps = self.steps
        if steps is not None and (type(steps) is not int or not 2 <= steps <= MAX_STEPS):
            expected = f"expected a whole number from 2 to {MAX_STEPS}"
            raise SpaceError("steps", f"{show(steps)} is not possible; {expected}")
        object.__setattr__(self, "when", _condition(self.when))

    def _points(self, *, log: bool) -> list[float]:
        """As many points as ``steps`` says, without the last digits that rounding leaves."""
        assert self.steps is not None
        last = self.steps - 1
        inner = (_between(k / last, self.lower, self.upper, log=log) for k in range(1, last))
        return [self.lower, *(float(f"{point:.12g}") for point in inner), self.upper]

    def _to_mapping(self, **flags: bool) -> dict[str, Any]:
        steps = {} if self.steps is None else {"steps": self.steps}
        flagged = {key: True for key, flag in flags.items() if flag}
        bounds = {"lower": self.lower, "upper": self.upper}
        return {**bounds, **flagged, **steps, **_when_to_mapping(self.when)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(_Range):
    """A number between two bounds."""

    def __post_init__(self) -> None:
        """Check each value."""
        self._check(log=False, whole=False)

    def at(self, fraction: float) -> float:
        """The value below which ``fraction`` of the domain's probability lies."""
        return _between(fraction, self.lower, self.upper, log=False)

    def grid(self) -> Sequence[Scalar] | None:
        """The values of a grid; None where ``steps`` has to say."""
        return None if self.steps is None else tuple(dict.fromkeys(self._points(log=False)))

    def to_mapping(self) -> dict[str, Any]:
        """The plain mapping that gives this domain."""
        return self._to_mapping()

    def __str__(self) -> str:
        """As a person reads it."""
        return f"{self.lower:g} .. {self.upper:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogUniform(_Range):
    """A positive number whose logarithm is uniform between those of the bounds."""

    def __post_init__(self) -> None:
        """Check each value."""
        self._check(log=True, whole=False)

    def at(self, fraction: float) -> float:
        """The value below which ``fraction`` of the domain's probability lies."""
        return _between(fraction, self.lower, self.upper, log=True)

    def grid(self) -> Sequence[Scalar] | None:
        """The values of a grid; None where ``steps`` has to say."""
        return None if self.steps is None else tuple(dict.fromkeys(self._points(log=True)))

    def to_mapping(self) -> dict[str, Any]:
        """The plain mapping that gives this domain."""
        return self._to_mapping(log=True)

    def __str__(self) -> str:
        """As a person reads it."""
        return f"{self.lower:g} .. {self.upper:g}, log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer(_Range):
    """A whole number between two bounds, uniform or (``log``) uniform in its logarithm."""

    log: bool = False

    def __post_init__(self) -> None:
        """Check each value."""
        _check_flag(self.log, "log")
        self._check(log=self.log, whole=True)

    def at(self, fraction: float) -> int:
        """The value below which ``fraction`` of the domain's probability lies."""
        lower, upper = int(self.lower), int(self.upper)
        if self.log:
            value = round(_between(fraction, lower - 0.5, upper + 0.5, log=True))
        else:
            value = lower + int(fraction * (upper - lower + 1))
        return min(max(value, lower), upper)

    def grid(self) -> Sequence[Scalar] | None:
        """The values of a grid: all of them, or as many as ``steps`` says."""
        if self.steps is None:
            return range(int(self.lower), int(self.upper) + 1)
        return tuple(dict.fromkeys(round(point) for point in self._points(log=self.log)))

    def to_mapping(self) -> dict[str, Any]:
        """The plain mapping that gives this domain."""
        return self._to_mapping(integer=True, log=self.log)

    def __str__(self) -> str:
        """As a person reads it."""
        return f"{self.lower} .. {self.upper}, integer{', log' if self.log else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several values."""

    choices: tuple[Scalar, ...]
    """The values, equally probable; a list is accepted."""
    when: Condition = ()
    """The dimension exists only where this holds; a mapping is accepted."""

    def __post_init__(self) -> None:
        """Check each value."""
        if not isinstance(self.choices, (list, tuple)) or not self.choices:
            expected = "expected a list of at least one value"
            raise SpaceError("choices", f"{show(self.choices)} is not possible; {expected}")
        choices = tuple(_scalar(value, "choices") for value in self.choices)
        for position, value in enumerate(choices):
            if value in choices[:position]:
                problem = f"{show(list(choices))} has {show(value)} twice; expected each value once"
                raise SpaceError("choices", problem)
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "when", _condition(self.when))

    def at(self, fraction: float) -> Scalar:
        """The choice at ``fraction`` of the list."""
        return self.choices[min(int(fraction * len(self.choices)), len(self.choices) - 1)]

    def grid(self) -> Sequence[Scalar] | None:
        """The values of a grid: all of them."""
        return self.choices

    def to_mapping(self) -> dict[str, Any]:
        """The plain mapping that gives this domain."""
        return {"choices": list(self.choices), **_when_to_mapping(self.when)}

    def __str__(self) -> str:
        """As a person reads it."""
        return " | ".join(str(value) for value in self.choices)


Domain = Uniform | LogUniform | Integer | Choice


def _check_flag(value: object, key: str) -> None:
    if not isinstance(value, bool):
        raise SpaceError(key, f"{show(value)} is not possible; expected true or false")


def domain_from_mapping(mapping: Mapping[str, Any]) -> Domain:
    """The domain of a plain mapping with ``choices``, or with ``lower`` and ``upper``.

    Raises:
        ExperimentError: Names the key inside the domain, the value and what would be right.
    """
    if isinstance(mapping, Mapping) and "choices" in mapping:
        check_keys(mapping, ("choices", "when"), "")
        return Choice(**mapping)
    check_keys(mapping, ("lower", "upper", "log", "integer", "steps", "choices", "when"), "")
    for key in ("lower", "upper"):
        if key not in mapping:
            raise SpaceError(key, "missing; a domain has lower and upper, or choices")
    rest = dict(mapping)
    log, integer = rest.pop("log", False), rest.pop("integer", False)
    _check_flag(log, "log")
    _check_flag(integer, "integer")
    if integer:
        return Integer(**rest, log=log)
    return LogUniform(**rest) if log else Uniform(**rest)
