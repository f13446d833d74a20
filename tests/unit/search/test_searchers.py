"""The searchers: repeatable draws, grids without repetition, and what they refuse."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from mpihpo.errors import ExperimentError, SpaceError
from mpihpo.search import SEARCHERS, GridSearcher, SearchSettings, Space, build_searcher

SPACE = {
    "lr": {"lower": 1e-4, "upper": 1.0, "log": True, "steps": 5},
    "optimizer": {"choices": ["sgd", "adam"]},
    "layers": {"lower": 1, "upper": 3, "integer": True},
}


def settings(**changes):
    return SearchSettings(**{"space": SPACE, "trials": 7, **changes})


def grid(space, trials=None):
    searcher = GridSearcher(space=Space.from_mapping(space), seed=0, mode="min", trials=trials)
    points = list(iter_asks(searcher))
    assert len(points) == searcher.trials
    return searcher, points


def iter_asks(searcher):
    for trial_id in itertools.count():
        config = searcher.ask(trial_id)
        if config is None:
            return
        yield config


def brute_force(space):
    """Every distinct point, by going through the whole product and dropping what is absent."""
    points = {}
    for values in itertools.product(*(space[name].grid() for name in space.order)):
        config = {}
        for name, value in zip(space.order, values, strict=True):
            if space.is_active(name, config):
                config[name] = value
        config = space.arrange(config)
        points[tuple(config.items())] = config
    return list(points.values())


@pytest.mark.parametrize("name", SEARCHERS)
def test_searchers_keep_their_contract(name):
    searcher = build_searcher(settings(searcher=name), seed=17, mode="min")
    again = build_searcher(settings(searcher=name), seed=17, mode="max")
    configs = [searcher.ask(trial_id) for trial_id in range(7)]
    assert searcher.ask(7) is None
    assert searcher.trials == 7
    assert [again.ask(k) for k in reversed(range(7))] == configs[::-1]
    assert len({tuple(config.items()) for config in configs}) == 7
    assert all(list(config) == list(SPACE) for config in configs)


def test_random_depends_on_the_seed():
    first, second = (build_searcher(settings(), seed=seed, mode="min") for seed in (1, 2))
    assert first.ask(0) != second.ask(0)


def test_grid_is_the_product_with_the_last_dimension_fastest():
    searcher, points = grid(SPACE)
    rates = (0.0001, 0.001, 0.01, 0.1, 1.0)
    expected = itertools.product(rates, ("sgd", "adam"), (1, 2, 3))
    assert [tuple(point.values()) for point in points] == list(expected)
    assert searcher.size == 30
    assert grid(SPACE, trials=4)[1] == points[:4]
    assert grid(SPACE, trials=99)[0].trials == 30


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        ({"lower": 0, "upper": 1, "steps": 3}, [0.0, 0.5, 1.0]),
        ({"lower": 0.1, "upper": 0.4, "steps": 4}, [0.1, 0.2, 0.3, 0.4]),
        ({"lower": 1, "upper": 100, "log": True, "steps": 3}, [1.0, 10.0, 100.0]),
        ({"lower": 1, "upper": 3, "integer": True}, [1, 2, 3]),
        ({"lower": 1, "upper": 9, "integer": True, "steps": 3}, [1, 5, 9]),
        ({"lower": 1, "upper": 3, "integer": True, "steps": 50}, [1, 2, 3]),
        ({"lower": 1, "upper": 64, "integer": True, "log": True, "steps": 4}, [1, 4, 16, 64]),
        ({"choices": ["b", None, True]}, ["b", None, True]),
    ],
)
def test_grid_values_of_each_domain(domain, values):
    assert [point["x"] for point in grid({"x": domain})[1]] == values


def test_conditional_dimensions_make_no_point_twice():
    space = {
        "momentum": {"lower": 0.5, "upper": 0.9, "steps": 2, "when": {"optimizer": "sgd"}},
        "optimizer": {"choices": ["sgd", "adam"]},
        "extra": {"choices": ["a", "b", "c"], "when": {"layers": [2, 4]}},
        "layers": {"lower": 1, "upper": 5, "integer": True},
    }
    points = grid(space)[1]
    assert len(points) == 3 * (3 + 2 * 3)
    assert len({tuple(point.items()) for point in points}) == len(points)
    assert {tuple(p.items()) for p in points} == {
        tuple(p.items()) for p in brute_force(Space.from_mapping(space))
    }


def test_grids_of_random_conditional_spaces_equal_the_filtered_product():
    rng = random.Random(0)
    for _ in range(60):
        space = {}
        for number in range(rng.randint(1, 5)):
            if rng.random() < 0.5:
                domain = {"lower": 0, "upper": rng.randint(1, 3), "integer": True}
            else:
                domain = {"choices": list(range(rng.randint(1, 3)))}
            for other in rng.sample(sorted(space), k=min(len(space), rng.randint(0, 2))):
                wanted = rng.sample([0, 1], k=rng.randint(1, 2))
                top = space[other].get("upper", len(space[other].get("choices", ())) - 1)
                domain.setdefault("when", {})[other] = [v for v in wanted if v <= top] or [0]
            space[f"d{number}"] = domain
        names = rng.sample(sorted(space), k=len(space))
        parsed = Space.from_mapping({name: space[name] for name in names})
        assert grid({name: space[name] for name in names})[1] == brute_force(parsed)


def test_huge_grids_are_counted_not_enumerated():
    space = {f"x{k}": {"lower": 0, "upper": 10**9 - 1, "integer": True} for k in range(20)}
    space["y"] = {"choices": [1, 2, 3], "when": {"x0": [5, 7], "x1": 10**8}}
    start = time.perf_counter()
    searcher = GridSearcher(space=Space.from_mapping(space), seed=0, mode="min", trials=None)
    assert searcher.size == 10**180 + 2 * 2 * 10 ** (9 * 18)
    assert searcher.ask(searcher.size - 1)["x19"] == 10**9 - 1
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"trials": None},
            "search.trials: missing; expected how many to draw at random",
        ),
        (
            {"trials": 0},
            "search.trials: 0 is not possible; expected a whole number of at least 1",
        ),
        (
            {"trials": "8"},
            "search.trials: '8' is not possible; expected a whole number of at least 1",
        ),
        (
            {"searcher": "tpe"},
            "search.searcher: there is no 'tpe'; available: random, grid, "
            "or your own as package.module:Name",
        ),
        (
            {"searcher": "grd"},
            "search.searcher: there is no 'grd'; did you mean grid? available: random, grid, "
            "or your own as package.module:Name",
        ),
        (
            {"searcher": ["grid"]},
            "search.searcher: there is no ['grid']; did you mean grid? available: random, grid, "
            "or your own as package.module:Name",
        ),
        (
            {"searcher": "no_such_module:Name"},
            "search.searcher: 'no_such_module:Name' cannot be imported: "
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            {"searcher": "math:pi"},
            "search.searcher: 'math:pi' is not a class",
        ),
        (
            {"searcher": "builtins:dict"},
            "search.searcher: 'builtins:dict' is no searcher; expected a class with ask and tell",
        ),
    ],
)
def test_wrong_search_settings_are_refused_in_one_line(changes, line):
    with pytest.raises(ExperimentError) as caught:
        settings(**changes)
    assert str(caught.value) == line


def test_the_grid_asks_for_steps():
    with pytest.raises(SpaceError) as caught:
        settings(searcher="grid", space={"lr": {"lower": 0, "upper": 1}})
    line = "search.space.lr.steps: missing; expected how many points the grid takes"
    assert str(caught.value) == line


def test_planned_trials():
    assert settings().planned_trials == 7
    assert settings(searcher="grid", trials=None).planned_trials == 30
    assert settings(searcher="grid").planned_trials == 7
