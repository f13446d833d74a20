"""Domains and conditions: what is refused with which line, and what is drawn."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest

from mpihpo.errors import SpaceError
from mpihpo.search import Choice, Integer, LogUniform, Space, Uniform

LR = {"lower": 1e-4, "upper": 1.0, "log": True}
CONDITIONAL = {
    "momentum": {"lower": 0.5, "upper": 0.99, "when": {"optimizer": "sgd", "deep": True}},
    "optimizer": {"choices": ["sgd", "adam", "rmsprop"]},
    "beta": {"lower": 0.8, "upper": 0.999, "when": {"optimizer": ["adam", "rmsprop"]}},
    "nesterov": {"choices": [False, True], "when": {"momentum_kind": "heavy"}},
    "momentum_kind": {"choices": ["heavy", "none"], "when": {"optimizer": "sgd"}},
    "deep": {"choices": [True, False]},
    "lr": LR,
}

FINITE = "is not possible; expected a finite number"
WHOLE = "is not possible; expected a whole number (up to 2**53), because of integer: true"
SCALAR = "is not possible; expected a finite number, a text, true, false or null"
KNOWN = "lower, upper, log, integer, steps, choices, when"


@pytest.mark.parametrize(
    ("domain", "line"),
    [
        ({"lower": 2, "upper": 1}, "x.lower: 2.0 is not below upper, which is 1.0"),
        ({"lower": 1, "upper": 1}, "x.lower: 1.0 is not below upper, which is 1.0"),
        (
            {"lower": 0, "upper": 1, "log": True},
            "x.lower: 0.0 is not possible; expected a number above 0, because of log: true",
        ),
        (
            {"lower": 0, "upper": 8, "log": True, "integer": True},
            "x.lower: 0 is not possible; expected a number above 0, because of log: true",
        ),
        ({"lower": 0.5, "upper": 4, "integer": True}, f"x.lower: 0.5 {WHOLE}"),
        ({"lower": 0, "upper": 1e300, "integer": True}, f"x.upper: 1e+300 {WHOLE}"),
        ({"lower": True, "upper": 4}, f"x.lower: True {FINITE}"),
        ({"lower": 0, "upper": "many"}, f"x.upper: 'many' {FINITE}"),
        ({"lower": math.nan, "upper": 1}, f"x.lower: nan {FINITE}"),
        ({"lower": 0, "upper": math.inf}, f"x.upper: inf {FINITE}"),
        ({"lower": 0, "upper": "inf"}, f"x.upper: 'inf' {FINITE}"),
        ({"lower": 0, "upper": None}, f"x.upper: None {FINITE}"),
        ({"lower": 0}, "x.upper: missing; a domain has lower and upper, or choices"),
        ({}, "x.lower: missing; a domain has lower and upper, or choices"),
        (None, f"x: None is not a section; expected keys: {KNOWN}"),
        (0.1, f"x: 0.1 is not a section; expected keys: {KNOWN}"),
        (
            {"lower": 0, "uper": 1},
            f"x.uper: unknown key; did you mean upper? known keys: {KNOWN}",
        ),
        (
            {"choices": [1], "steps": 2},
            "x.steps: unknown key; known keys: choices, when",
        ),
        (
            {"lower": 1, "upper": 2, "log": "yes"},
            "x.log: 'yes' is not possible; expected true or false",
        ),
        (
            {"lower": 1, "upper": 2, "integer": 1},
            "x.integer: 1 is not possible; expected true or false",
        ),
        (
            {"lower": 0, "upper": 1, "steps": 1},
            "x.steps: 1 is not possible; expected a whole number from 2 to 100000",
        ),
        (
            {"lower": 0, "upper": 1, "steps": True},
            "x.steps: True is not possible; expected a whole number from 2 to 100000",
        ),
        (
            {"choices": []},
            "x.choices: [] is not possible; expected a list of at least one value",
        ),
        (
            {"choices": "sgd"},
            "x.choices: 'sgd' is not possible; expected a list of at least one value",
        ),
        (
            {"choices": ["a", "b", "a"]},
            "x.choices: ['a', 'b', 'a'] has 'a' twice; expected each value once",
        ),
        ({"choices": [1, 1.0]}, "x.choices: [1, 1.0] has 1.0 twice; expected each value once"),
        ({"choices": [[1, 2]]}, f"x.choices: [1, 2] {SCALAR}"),
        ({"choices": [math.nan]}, f"x.choices: nan {SCALAR}"),
        (
            {"choices": [1], "when": "other"},
            "x.when: 'other' is not possible; expected {other: value}",
        ),
        (
            {"choices": [1], "when": {"other": []}},
            "x.when.other: an empty list never holds; expected a value",
        ),
        ({"choices": [1], "when": {"other": {}}}, f"x.when.other: {{}} {SCALAR}"),
    ],
)
def test_impossible_domains_are_refused_in_one_line(domain, line):
    with pytest.raises(SpaceError) as caught:
        Space.from_mapping({"x": domain})
    assert str(caught.value) == f"search.space.{line}"


@pytest.mark.parametrize(
    ("space", "line"),
    [
        (
            {
                "x": {"choices": [1], "when": {"optimiser": "sgd"}},
                "optimizer": {"choices": ["sgd"]},
            },
            ".x.when.optimiser: unknown name; did you mean optimizer? "
            "names in the space: x, optimizer",
        ),
        (
            {"x": {"choices": [1], "when": {"o": "sgd"}}, "o": {"choices": ["adam", "lbfgs"]}},
            ".x.when.o: 'sgd' never occurs; o is adam | lbfgs",
        ),
        (
            {"x": {"choices": [1], "when": {"flag": 1}}, "flag": {"choices": [True, False]}},
            ".x.when.flag: 1 never occurs; flag is True | False",
        ),
        (
            {
                "x": {"choices": [1], "when": {"n": 9}},
                "n": {"lower": 1, "upper": 4, "integer": True},
            },
            ".x.when.n: 9 never occurs; n is 1 .. 4, integer",
        ),
        (
            {"x": {"choices": [1], "when": {"lr": 0.1}}, "lr": LR},
            ".x.when.lr: lr is continuous; expected choices or integers",
        ),
        (
            {"x": {"choices": [1], "when": {"x": 1}}},
            ".x.when: x depends on itself; expected conditions without a circle",
        ),
        (
            {
                "leaf": {"choices": [1], "when": {"a": 1}},
                "a": {"choices": [1], "when": {"b": 1}},
                "b": {"choices": [1], "when": {"c": 1}},
                "c": {"choices": [1], "when": {"a": 1}},
            },
            ".a.when: a depends on itself; expected conditions without a circle",
        ),
        ({True: LR}, ".True: the name True is not a text; put it in quotes"),
        ({"a.b": LR}, ".a.b: the name 'a.b' is not possible; expected a text without '.' and '/'"),
        ({}, ": empty; expected at least one name with its domain"),
        ([LR], f": {[LR]} is not a section; expected name: domain"),
    ],
)
def test_impossible_spaces_are_refused_in_one_line(space, line):
    with pytest.raises(SpaceError) as caught:
        Space.from_mapping(space)
    assert str(caught.value) == f"search.space{line}"


def test_bounds_that_yaml_took_for_text_are_numbers():
    space = Space.from_mapping(
        {
            "lr": {"lower": "1e-4", "upper": "1", "log": True},
            "n": {"lower": "1e0", "upper": 4.0, "integer": True},
        }
    )
    assert space["lr"] == LogUniform(lower=1e-4, upper=1.0)
    assert space["n"] == Integer(lower=1, upper=4)
    assert type(space["n"].lower) is int


@pytest.mark.parametrize(
    ("domain", "kind"),
    [
        (Uniform(lower=-1.0, upper=2.0), float),
        (Uniform(lower=-1e308, upper=1e308), float),
        (LogUniform(lower=1e-6, upper=10.0), float),
        (Integer(lower=-3, upper=4), int),
        (Integer(lower=1, upper=1000, log=True), int),
    ],
)
def test_ranges_reach_both_bounds_and_stay_inside(domain, kind):
    values = [domain.at(k / 1000) for k in range(1001)]
    assert all(type(value) is kind for value in values)
    assert values == sorted(values)
    assert values[0] == pytest.approx(domain.lower)
    assert values[-1] == pytest.approx(domain.upper)
    assert all(domain.lower <= value <= domain.upper for value in values)


def test_integers_and_choices_are_equally_probable():
    integers = Counter(Integer(lower=1, upper=4).at(k / 400) for k in range(400))
    assert integers == {1: 100, 2: 100, 3: 100, 4: 100}
    choices = Counter(Choice(choices=("a", "b")).at(k / 400) for k in range(400))
    assert choices == {"a": 200, "b": 200}


def test_log_domains_spend_equal_shares_on_decades():
    decades = Counter(
        math.floor(math.log10(LogUniform(lower=1e-3, upper=1.0).at((k + 0.5) / 300)))
        for k in range(300)
    )
    assert decades == {-3: 100, -2: 100, -1: 100}


def test_a_configuration_depends_on_seed_trial_and_name_alone():
    small = Space.from_mapping({"lr": LR, "width": {"choices": [64, 128, 256]}})
    large = Space.from_mapping(
        {"extra": {"lower": 0, "upper": 1}, "width": {"choices": [64, 128, 256]}, "lr": LR}
    )
    for trial_id in (5, 0, 3, 5):
        config = small.sample(17, trial_id)
        assert config == small.sample(17, trial_id)
        assert config.items() <= large.sample(17, trial_id).items()
    assert len({small.sample(17, k)["lr"] for k in range(100)}) == 100
    assert small.sample(17, 0)["lr"] != small.sample(18, 0)["lr"]


def test_draws_do_not_change_between_versions():
    # Written down once: who resumes or repeats an experiment later must get these.
    space = Space.from_mapping({"lr": LR, "n": {"lower": 1, "upper": 9, "integer": True}})
    assert [space.sample(17, k) for k in range(2)] == [
        {"lr": pytest.approx(0.0005366899193699102), "n": 3},
        {"lr": pytest.approx(0.524922277503341), "n": 5},
    ]


def test_dimensions_exist_only_where_all_conditions_hold():
    space = Space.from_mapping(CONDITIONAL)
    seen = Counter()
    for trial_id in range(400):
        config = space.sample(1, trial_id)
        sgd = config["optimizer"] == "sgd"
        assert ("momentum" in config) == (sgd and config["deep"])
        assert ("beta" in config) == (not sgd)
        assert ("momentum_kind" in config) == sgd
        assert ("nesterov" in config) == (config.get("momentum_kind") == "heavy")
        assert list(config) == [name for name in CONDITIONAL if name in config]
        seen.update(config)
    assert set(seen) == set(CONDITIONAL)
    assert space.order.index("nesterov") > space.order.index("momentum_kind")


def test_true_and_1_are_different_conditions():
    space = Space.from_mapping(
        {"n": {"choices": [0, 1]}, "x": {"choices": [5], "when": {"n": 1}}, "y": {"choices": [7]}}
    )
    assert space.is_active("x", {"n": 1})
    assert not space.is_active("x", {"n": True})


def test_space_round_trips_through_its_mapping_and_pickle():
    space = Space.from_mapping({**CONDITIONAL, "k": {"lower": 1, "upper": 9, "integer": True}})
    assert Space.from_mapping(space.to_mapping()) == space
    assert list(Space.from_mapping(space.to_mapping())) == list(space)
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space
    assert copy.sample(3, 4) == space.sample(3, 4)
    assert space.to_mapping()["lr"] == LR
    assert space.to_mapping()["momentum"]["when"] == {"optimizer": "sgd", "deep": True}


def test_a_domain_of_python_is_accepted_beside_plain_ones():
    space = Space.from_mapping({"lr": LogUniform(lower=1e-4, upper=1.0), "w": {"choices": [1]}})
    assert space["lr"] == Space.from_mapping({"lr": LR})["lr"]
    with pytest.raises(SpaceError, match=r"^search\.space\.lr: 0\.1 is not a domain$"):
        Space({"lr": 0.1})
