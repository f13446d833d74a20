"""JSON text that keeps every float, and short text for sets of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _plain(value: Any) -> Any:
    """What numpy scalars and read-only mappings are in JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be kept in the results: {value!r}")


_encode = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, check_circular=False, default=_plain
).encode


def to_json(value: Any) -> str:
    """One line of ASCII; a non-finite float becomes ``{"float": "nan"}`` (or ``inf``, ``-inf``).

    JSON has no such numbers, and a bare string could not be told from a configuration's string.
    """
    try:
        return _encode(value)
    except ValueError:
        return _encode(_tagged(value))


def from_json(text: str | bytes) -> Any:
    """The value that ``to_json`` was given, tuples having become lists.

    Raises:
        ValueError: The text is not JSON.
    """
    value = json.loads(text)
    mark = b'{"float":"' if isinstance(text, bytes) else '{"float":"'
    return _untagged(value) if mark in text else value  # type: ignore[operator]


def _tagged(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tagged(item) for item in value]
    return _tagged(value.item()) if hasattr(value, "item") else value


def _untagged(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and value.get("float").__class__ is str:
            return _NON_FINITE.get(value["float"], value)
        return {key: _untagged(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    return value


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The ranks, in their order, as runs of consecutive numbers: (first, how many)."""
    if not ranks:
        return []
    first, count = ranks[0], len(ranks)
    if count == 1 or tuple(ranks) == tuple(range(first, first + count)):
        return [(first, count)]
    runs = [(first, 1)]
    for rank in ranks[1:]:
        first, count = runs[-1]
        if rank == first + count:
            runs[-1] = (first, count + 1)
        else:
            runs.append((rank, 1))
    return runs


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in their order as text: ``0-3,8``; empty for none."""
    if len(ranks) == 1:
        return str(ranks[0])
    return ",".join(
        str(first) if count == 1 else f"{first}-{first + count - 1}"
        for first, count in runs_of(ranks)
    )


def name_ranks(ranks: Collection[int]) -> str:
    """Ranks for people: ``rank 3``, ``ranks 0-3,8``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(sorted(ranks))}"


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks that ``format_ranks`` was given.

    Raises:
        ValueError: The text is no such list.
    """
    ranks: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return tuple(ranks)
