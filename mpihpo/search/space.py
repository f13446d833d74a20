"""The search space: named domains, some of which exist only where others have certain values.

A drawn configuration depends on the seed, the trial's number and the dimensions' names alone, so
that adding a dimension leaves the others as they were and no generator is shared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from mpihpo.errors import ExperimentError, SpaceError
from mpihpo.records import Config, Scalar
from mpihpo.search.domains import (
    Choice,
    Domain,
    Integer,
    LogUniform,
    Uniform,
    contains,
    domain_from_mapping,
)
from mpihpo.settings import advise, show


class Space(Mapping[str, Domain]):
    """An ordered, immutable mapping from names to domains."""

    __slots__ = ("_domains", "_order")

    def __init__(self, domains: Mapping[str, Domain], where: str = "search.space") -> None:
        """Check the names and conditions.

        Args:
            domains: Names to domains, in the order in which they are shown.
            where: Dotted key that errors start with.

        Raises:
            SpaceError: A name is no name, or a ``when`` is impossible or in a circle.
        """
        if not domains:
            raise SpaceError(where, "empty; expected at least one name with its domain")
        for name, domain in domains.items():
            _check_name(name, where)
            if not isinstance(domain, (Uniform, LogUniform, Integer, Choice)):
                raise SpaceError(f"{where}.{name}", f"{show(domain)} is not a domain")
        self._domains = dict(domains)
        for name in self._domains:
            self._check_condition(name, f"{where}.{name}.when")
        self._order = self._sort(where)

    @classmethod
    def from_mapping(cls, mapping: object, where: str = "search.space") -> Space:
        """Build from plain mappings, as YAML gives them.

        Raises:
            SpaceError: Names the dotted key, the value and what would be right.
        """
        if not isinstance(mapping, Mapping):
            raise SpaceError(where, f"{show(mapping)} is not a section; expected name: domain")
        domains: dict[str, Domain] = {}
        for name, given in mapping.items():
            _check_name(name, where)
            if isinstance(given, (Uniform, LogUniform, Integer, Choice)):
                domains[name] = given
                continue
            try:
                domains[name] = domain_from_mapping(given)
            except ExperimentError as error:
                dotted = ".".join(part for part in (where, name, error.where) if part)
                raise SpaceError(dotted, error.problem) from None
        return cls(domains, where)

    def to_mapping(self) -> dict[str, Any]:
        """The plain mappings that give this space."""
        return {name: domain.to_mapping() for name, domain in self._domains.items()}

    def __getitem__(self, name: str) -> Domain:
        """The domain of a name."""
        return self._domains[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they were given."""
        return iter(self._domains)

    def __len__(self) -> int:
        """The number of dimensions."""
        return len(self._domains)

    def __repr__(self) -> str:
        """All domains."""
        return f"Space({self._domains!r})"

    @property
    def order(self) -> tuple[str, ...]:
        """The names, each after those that its ``when`` speaks of."""
        return self._order

    def is_active(self, name: str, config: Config) -> bool:
        """Whether the dimension exists, given the values of those that its ``when`` speaks of."""
        return all(
            other in config and contains(values, config[other])
            for other, values in self._domains[name].when
        )

    def sample(self, seed: int, trial_id: int) -> dict[str, Scalar]:
        """The configuration of one trial, names in the space's order.

        Args:
            seed: The experiment's seed.
            trial_id: Number of the trial.
        """
        drawn: dict[str, Scalar] = {}
        for name in self._order:
            if self.is_active(name, drawn):
                digest = hashlib.sha256(f"{seed}/{trial_id}/{name}".encode()).digest()
                # random() alone is promised to give the same numbers in every version of Python.
                fraction = random.Random(int.from_bytes(digest, "big")).random()
                drawn[name] = self._domains[name].at(fraction)
        return self.arrange(drawn)

    def arrange(self, config: Config) -> dict[str, Scalar]:
        """The configuration with its names in the space's order."""
        return {name: config[name] for name in self._domains if name in config}

    def _check_condition(self, name: str, where: str) -> None:
        for other, values in self._domains[name].when:
            key = f"{where}.{other}"
            if other not in self._domains:
                names = advise(other, self._domains, "names in the space")
                raise SpaceError(key, f"unknown name; {names}")
            domain = self._domains[other]
            if isinstance(domain, (Uniform, LogUniform)):
                raise SpaceError(key, f"{other} is continuous; expected choices or integers")
            for value in values:
                if isinstance(domain, Choice):
                    possible = contains(domain.choices, value)
                else:
                    possible = type(value) is int and domain.lower <= value <= domain.upper
                if not possible:
                    raise SpaceError(key, f"{show(value)} never occurs; {other} is {domain}")

    def _sort(self, where: str) -> tuple[str, ...]:
        order: list[str] = []
        waiting = list(self._domains)
        while waiting:
            ready = [n for n in waiting if all(o in order for o, _ in self._domains[n].when)]
            if not ready:
                name = self._in_circle(waiting)
                circle = f"{name} depends on itself; expected conditions without a circle"
                raise SpaceError(f"{where}.{name}.when", circle)
            order.append(ready[0])
            waiting.remove(ready[0])
        return tuple(order)

    def _in_circle(self, waiting: list[str]) -> str:
        """A name of ``waiting`` (each waits for another of them) that leads back to itself."""
        seen: list[str] = []
        name = waiting[0]
        while name not in seen:
            seen.append(name)
            name = next(other for other, _ in self._domains[name].when if other in waiting)
        return name


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str):
        raise SpaceError(f"{where}.{name}", f"the name {name!r} is not a text; put it in quotes")
    if not name or "." in name or "/" in name:
        problem = f"the name {name!r} is not possible; expected a text without '.' and '/'"
        raise SpaceError(f"{where}.{name}", problem)
