"""The section ``limits``: when to stop, how long to wait for a rank, how much to keep."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mpihpo.errors import ExperimentError
from mpihpo.settings import as_number, check_integer, check_keys, show

_UNITS = re.compile(
    r"(?:(?P<d>\d+(?:\.\d+)?)d)?(?:(?P<h>\d+(?:\.\d+)?)h)?"
    r"(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?"
)
_CLOCK = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(|B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_BYTES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base, prefixes in (("B", 1000, "kMGT"), ("iB", 1024, "KMGT"))
    for power, prefix in enumerate(prefixes)
}
_DURATIONS = {
    "time": "time_seconds",
    "trial_seconds": "trial_seconds",
    "grace_seconds": "grace_seconds",
    "heartbeat_seconds": "heartbeat_seconds",
}
"""Keys in YAML that are durations, and their fields."""
_OPTIONAL = ("time_seconds", "trial_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Durations in seconds, or text such as ``2h``; sizes in bytes, or text such as ``200GB``.

    Raises:
        ExperimentError: A value is impossible; names its dotted key.
    """

    time_seconds: float | None = None
    """Of the whole job, None for no limit; the key in YAML is ``time``."""
    trial_seconds: float | None = None
    """Of one evaluation; None: no limit."""
    retries: int = 0
    """How often a trial that failed is trained again from where its rung began."""
    grace_seconds: float = 60.0
    """How long a rank that is to leave a failed trial may take before it is set aside."""
    heartbeat_seconds: float = 300.0
    """How long a rank that trains may give no sign of life."""
    state_bytes: int | None = None
    """What the kept states of all trials may take together, in the memory of all ranks and, counted
    apart, on the disk; None: no limit."""

    def __post_init__(self) -> None:
        """Check each value."""
        check_integer(self.retries, "limits.retries", least=0)
        for key, name in _DURATIONS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, parse_duration(value, f"limits.{key}"))
        if self.state_bytes is not None:
            size = parse_size(self.state_bytes, "limits.state_bytes")
            object.__setattr__(self, "state_bytes", size)

    @classmethod
    def from_mapping(cls, mapping: object) -> Limits:
        """Build from a section whose keys are the fields, but ``time`` for ``time_seconds``."""
        mapping = {} if mapping is None else mapping
        check_keys(mapping, (*_DURATIONS, "retries", "state_bytes"), "limits")
        assert isinstance(mapping, Mapping)
        named = {_DURATIONS.get(str(key), str(key)): value for key, value in mapping.items()}
        return cls(**named)

    def to_mapping(self) -> dict[str, Any]:
        """The plain mapping that gives these settings."""
        keys = {name: key for key, name in _DURATIONS.items()}
        return {
            keys.get(each.name, each.name): getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }


def parse_duration(value: object, where: str) -> float:
    """Seconds of a number or a text: ``90s``, ``1h30m``, ``HH:MM:SS`` or ``D-HH:MM:SS``.

    Raises:
        ExperimentError: The value is no duration above 0; ``where`` is its dotted key.
    """
    seconds = as_number(value)
    if seconds is None and isinstance(value, str):
        text = value.replace(" ", "")
        match = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
        if match:
            parts = match.groupdict()
            seconds = sum(float(parts[unit] or 0) * _SECONDS[unit] for unit in parts)
    if seconds is None or not 0 < seconds < math.inf:
        expected = "expected seconds, or text such as 90s, 1h30m, 02:00:00 or 1-12:00:00"
        raise ExperimentError(where, f"{show(value)} is not possible; {expected}")
    return float(seconds)


def parse_size(value: object, where: str) -> int:
    """Bytes of a number or a text: ``500MB``, ``1.5 TB`` or ``64GiB``.

    Raises:
        ExperimentError: The value is no size above 0; ``where`` is its dotted key.
    """
    number = as_number(value)
    if number is None and isinstance(value, str):
        match = _SIZE.fullmatch(value.replace(" ", ""))
        number = float(match[1]) * _BYTES[match[2]] if match else None
    if number is None or not 1 <= number < math.inf:
        expected = "expected bytes, or text such as 500MB, 1.5TB or 64GiB"
        raise ExperimentError(where, f"{show(value)} is not possible; {expected}")
    return int(number)
