"""Rung arithmetic of successive halving: how far each rung trains and how many trials reach it.

With the reduction factor eta, rung k trains to ``min_epochs * eta**k`` epochs and 1/eta of its
trials go on: Karnin, Koren and Somekh, "Almost optimal exploration in multi-armed bandits", ICML
2013 (algorithm 3, there with eta = 2); Jamieson and Talwalkar, "Non-stochastic best arm
identification and hyperparameter optimization", AISTATS 2016 (figure 3), for training curves.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpihpo.records import RungPlan


def rung_stops(min_epochs: int, max_epochs: int, reduction_factor: int) -> tuple[int, ...]:
    """Completed epochs at the end of each rung; the last one is ``max_epochs``."""
    stops = []
    stop = min_epochs
    while stop < max_epochs:
        stops.append(stop)
        stop *= reduction_factor
    return (*stops, max_epochs)


def promotions(trials: int, reduction_factor: int) -> int:
    """How many of a rung's trials go on when none fails: never fewer than one."""
    return max(1, trials // reduction_factor)


def planned_ladder(
    stops: Sequence[int], trials: int, reduction_factor: int
) -> tuple[RungPlan, ...]:
    """The ladder of an experiment in which no trial fails."""
    ladder = []
    start = 0
    for rung, stop in enumerate(stops):
        ladder.append(RungPlan(rung=rung, start=start, stop=stop, trials=trials))
        trials = promotions(trials, reduction_factor)
        start = stop
    return tuple(ladder)
