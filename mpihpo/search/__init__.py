"""What to try: the space of configurations, and the searchers that propose them."""

from mpihpo.search.domains import Choice, Domain, Integer, LogUniform, Uniform
from mpihpo.search.searchers import GridSearcher, RandomSearcher, Searcher
from mpihpo.search.settings import SEARCHERS, SearchSettings, build_searcher
from mpihpo.search.space import Space

__all__ = [
    "SEARCHERS",
    "Choice",
    "Domain",
    "GridSearcher",
    "Integer",
    "LogUniform",
    "RandomSearcher",
    "SearchSettings",
    "Searcher",
    "Space",
    "Uniform",
    "build_searcher",
]
