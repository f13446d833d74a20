"""The ``search`` section of the experiment, and the searchers it can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpihpo.errors import ExperimentError
from mpihpo.search.searchers import GridSearcher, RandomSearcher, Searcher
from mpihpo.search.space import Space
from mpihpo.settings import accept_mapping, check_integer, load_class

SEARCHERS: dict[str, type[Any]] = {
    "random": RandomSearcher,
    "grid": GridSearcher,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """What to try, and who proposes it.

    Raises:
        ExperimentError: A value is impossible, or the searcher refuses the space.
    """

    space: Space
    """The dimensions of a configuration; plain mappings are accepted."""
    searcher: str = "random"
    """A name of ``SEARCHERS``, or ``package.module:Name``."""
    trials: int | None = None
    """How many configurations at most; None: as many as the searcher has."""

    def __post_init__(self) -> None:
        """Check each value."""
        accept_mapping(self, "space", Space, Space.from_mapping)
        if self.trials is not None:
            check_integer(self.trials, "search.trials", least=1)
        build_searcher(self, seed=0, mode="min")

    @property
    def planned_trials(self) -> int | None:
        """How many configurations the searcher will propose; None where it cannot say."""
        searcher = build_searcher(self, seed=0, mode="min")
        planned: int | None = getattr(searcher, "trials", self.trials)
        return planned

    def to_mapping(self) -> dict[str, Any]:
        """The plain mapping that gives these settings."""
        trials: Mapping[str, Any] = {} if self.trials is None else {"trials": self.trials}
        return {"searcher": self.searcher, **trials, "space": self.space.to_mapping()}


def build_searcher(settings: SearchSettings, *, seed: int, mode: str) -> Searcher:
    """The searcher that the settings name.

    Args:
        settings: The ``search`` section.
        seed: The experiment's seed.
        mode: ``min`` or ``max``: which objective is better.

    Raises:
        ExperimentError: There is no such searcher, or it refuses the settings.
    """
    cls = load_class(settings.searcher, SEARCHERS, "search.searcher")
    try:
        searcher = cls(space=settings.space, seed=seed, mode=mode, trials=settings.trials)
    except TypeError as error:
        raise ExperimentError("search.searcher", f"{settings.searcher}: {error}") from error
    if not isinstance(searcher, Searcher):
        problem = f"{settings.searcher!r} is no searcher; expected a class with ask and tell"
        raise ExperimentError("search.searcher", problem)
    return searcher
