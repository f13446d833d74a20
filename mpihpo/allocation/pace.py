"""How long an epoch takes, learned from outcomes: enough to start nothing that cannot finish."""

from __future__ import annotations

from bisect import insort

from mpihpo.records import Outcome


class Pace:
    """Seconds per epoch, by trial where it has trained, else the median of all that have."""

    def __init__(self) -> None:
        self._of_trial: dict[int, float] = {}
        self._sorted: list[float] = []

    def learn(self, outcome: Outcome) -> None:
        """Take the last epoch of an outcome, which leaves start-up out where it can."""
        reports = outcome.reports
        if not reports:
            return
        earlier = reports[-2].seconds if len(reports) > 1 else 0.0
        seconds = reports[-1].seconds - earlier
        self._of_trial[outcome.allocation.evaluation.trial.id] = seconds
        insort(self._sorted, seconds)

    def epoch_seconds(self, trial_id: int) -> float:
        """Expected seconds of the trial's next epoch; 0 as long as nothing was measured.

        Ranks are not counted: a wider group is not slower, so this errs on the safe side.
        """
        if trial_id in self._of_trial:
            return self._of_trial[trial_id]
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0
