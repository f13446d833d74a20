"""What the soak plans for its trials, and what it takes for wrong."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEED = 1


@pytest.fixture(scope="module")
def soak() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))  # benchmarks import each other as programs do
    try:
        import soak_plan

        yield soak_plan
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_plans_depend_on_seed_and_trial_alone(soak: Any) -> None:
    plans = [soak.draw(SEED, trial) for trial in range(200)]
    assert plans == [soak.draw(SEED, trial) for trial in range(200)]
    assert plans != [soak.draw(SEED + 1, trial) for trial in range(200)]


def test_plans_have_every_fault_in_every_place(soak: Any) -> None:
    plans = [soak.draw(SEED, trial) for trial in range(5000)]
    kinds = Counter(plan.kind for plan in plans)
    assert set(kinds) == {soak.NOTHING, *soak.ERRORS}
    assert 0.45 < kinds[soak.NOTHING] / len(plans) < 0.55
    assert {plan.width(4) for plan in plans} == {1, 2, 3, 4}
    epochs = {(plan.rung, plan.epoch) for plan in plans}
    assert epochs == {(0, 1), (0, 2), (1, 3), (1, 4)}
    for kind in soak.ERRORS:
        positions = {plan.position(3) for plan in plans if plan.kind == kind}
        assert positions == ({0} if kind in soak.OF_THE_LEADER else {0, 1, 2}), kind


def plan(soak: Any, kind: str, rung: int = 1) -> Any:
    return soak.Plan(kind, rung, 2 * rung + 1, 0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "status", "rung", "error", "was_spared", "is_right"),
    [
        ("nothing", "completed", 1, "", False, True),
        ("nothing", "failed", 1, "Chosen", False, False),
        ("nothing", "completed", 1, "Chosen", False, False),
        ("nothing", "parked", 0, "", False, True),
        ("exception", "failed", 1, "Chosen", False, True),
        ("exception", "failed", 0, "Chosen", False, False),
        ("exception", "failed", 1, "TrialTimeout", False, False),
        ("exception", "completed", 1, "", False, False),
        ("exception", "parked", 0, "", False, True),
        ("sleep", "failed", 1, "TrialTimeout", False, True),
        ("sleep", "completed", 1, "", True, True),
        ("sleep", "failed", 1, "TrialTimeout", True, False),
    ],
)
def test_what_becomes_of_a_trial(
    soak: Any, kind: str, status: str, rung: int, error: str, was_spared: bool, is_right: bool
) -> None:
    account = soak.Account(7, status, rung, error, was_spared)
    problem = soak.problem_with(plan(soak, kind), account)
    assert (problem is None) == is_right, problem
    if not is_right:
        assert problem.startswith(f"trial 7 ({kind} in rung 1): {status} in rung {rung}")


def test_seconds_to_release_are_those_of_the_last_rank(soak: Any) -> None:
    entries = [
        [(0.0, 0, 0), (3.0, 1, 0), (6.0, 3, 0)],
        [(0.5, 0, 0), (4.5, 2, 0)],
        [(0.1, 9, 0), (5.0, 1, 0), (7.0, 2, 0)],
    ]
    faults = {(0, 0): 2.0, (1, 0): 5.5, (2, 0): 8.0}
    # Trial 2 held two ranks, which entered nothing more.
    assert soak.seconds_to_release(entries, faults) == {(0, 0): 2.5, (1, 0): 1.5}


def test_growth_compares_after_warming_up_with_the_end(soak: Any) -> None:
    samples = [
        {"time": 1.0 * second, "threads": 3 + (second > 60), "failed groups": second}
        for second in range(101)
    ]
    assert soak.growth(samples, 100) == {"threads": 1, "failed groups": 60}
    assert soak.growth(samples[:50], 100) == {}


def test_too_much(soak: Any) -> None:
    grown = {**dict.fromkeys(soak.MOST_GROWTH, 0.0), "communicators": 30, "failed groups": 10}
    assert soak.too_much(grown, rank=1, evaluations=0) == []
    assert soak.too_much({**grown, "communicators": 35}, rank=1, evaluations=0) == [
        "communicators have grown by 35, at most 34 is right"
    ]
    more = {**grown, "memory_mib": 30.0}
    assert len(soak.too_much(more, rank=1, evaluations=5000)) == 1
    assert soak.too_much(more, rank=0, evaluations=5000) == []
    assert len(soak.too_much({}, rank=1, evaluations=0)) == 1
