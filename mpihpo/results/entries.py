"""Records as the fields of journal entries, and back without a loss.

    journal.append("outcome", **encode_outcome(outcome))
    decode_outcome(entry, trials)  # == outcome

A configuration stands in its ``trial`` entry only; the others name the trial by its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpihpo.errors import ResultsError
from mpihpo.records import (
    Allocation,
    Ending,
    Evaluation,
    Failure,
    Outcome,
    Report,
    RungResult,
    Spent,
    TrialRecord,
)
from mpihpo.results.encoding import format_ranks, parse_ranks

JOURNAL_LAYOUT = 1
"""Raised when entries change so that an older reader would misunderstand them."""

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What an experiment was started with: the journal's first entry."""

    experiment_text: str
    """The effective experiment as YAML."""
    seed: int
    versions: Mapping[str, str]
    """Of mpihpo and of the libraries under it."""
    nodes: tuple[str, ...]
    """Name of the node of each world rank."""

    @property
    def world_size(self) -> int:
        """Number of world ranks."""
        return len(self.nodes)


def encode_experiment(provenance: Provenance) -> dict[str, Any]:
    """Fields of an ``experiment`` entry; neighbouring ranks of one node share one item."""
    runs: list[list[Any]] = []
    for name in provenance.nodes:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return {
        "layout": JOURNAL_LAYOUT,
        "experiment": provenance.experiment_text,
        "seed": provenance.seed,
        "versions": dict(provenance.versions),
        "world_size": provenance.world_size,
        "nodes": runs,
    }


def decode_experiment(entry: Entry) -> Provenance:
    """The provenance of an ``experiment`` entry.

    Raises:
        ResultsError: The journal has a newer layout.
    """
    if entry["layout"] > JOURNAL_LAYOUT:
        raise ResultsError(
            f"the journal has layout {entry['layout']}, this mpihpo reads up to "
            f"{JOURNAL_LAYOUT}: use the mpihpo that wrote it or a newer one"
        )
    return Provenance(
        experiment_text=entry["experiment"],
        seed=entry["seed"],
        versions=entry["versions"],
        nodes=tuple(name for name, count in entry["nodes"] for _ in range(count)),
    )


def encode_trial(trial: TrialRecord) -> dict[str, Any]:
    """Fields of a ``trial`` entry."""
    return {"trial": trial.id, "config": dict(trial.config), "seed": trial.seed}


def decode_trial(entry: Entry) -> TrialRecord:
    """The trial of a ``trial`` entry."""
    return TrialRecord(id=entry["trial"], config=entry["config"], seed=entry["seed"])


def encode_start(allocation: Allocation) -> dict[str, Any]:
    """Fields of a ``start`` entry, also part of an ``outcome`` entry."""
    evaluation = allocation.evaluation
    return {
        "serial": allocation.serial,
        "trial": evaluation.trial.id,
        "rung": evaluation.rung,
        "start": evaluation.start,
        "stop": evaluation.stop,
        "ranks": format_ranks(allocation.ranks),
        "holders": format_ranks(allocation.holders),
        "keepers": format_ranks(allocation.keepers),
    }


def decode_start(entry: Entry, trials: Mapping[int, TrialRecord]) -> Allocation:
    """The allocation of a ``start`` or ``outcome`` entry.

    Args:
        entry: The entry.
        trials: The trials of earlier ``trial`` entries, by id.

    Raises:
        ResultsError: The trial's own entry is lost.
    """
    try:
        trial = trials[entry["trial"]]
    except KeyError:
        raise ResultsError(
            f"journal entry {entry.get('seq')}: trial {entry['trial']} has no entry"
        ) from None
    return Allocation(
        serial=entry["serial"],
        evaluation=Evaluation(
            trial=trial, rung=entry["rung"], start=entry["start"], stop=entry["stop"]
        ),
        ranks=parse_ranks(entry["ranks"]),
        holders=parse_ranks(entry["holders"]),
        keepers=parse_ranks(entry["keepers"]),
    )


def encode_outcome(outcome: Outcome) -> dict[str, Any]:
    """Fields of an ``outcome`` entry: it stands alone but for its trial's configuration."""
    fields = encode_start(outcome.allocation)
    spent, failure = outcome.spent, outcome.failure
    fields["ending"] = outcome.ending.value
    fields["reports"] = [
        (report.epoch, report.metrics, report.seconds) for report in outcome.reports
    ]
    fields["objective"] = outcome.objective
    fields["failure"] = failure and {
        "rank": failure.rank,
        "kind": failure.kind,
        "message": failure.message,
        "traceback": failure.traceback,
    }
    fields["t_start"] = outcome.t_start
    fields["t_stop"] = outcome.t_stop
    fields["spent"] = (spent.resplit, spent.restore, spent.train, spent.save)
    fields["state_bytes"] = outcome.state_bytes
    return fields


def decode_outcome(entry: Entry, trials: Mapping[int, TrialRecord]) -> Outcome:
    """The outcome of an ``outcome`` entry; arguments and errors as of ``decode_start``."""
    failure = entry["failure"]
    return Outcome(
        allocation=decode_start(entry, trials),
        ending=Ending(entry["ending"]),
        reports=tuple(Report(*fields) for fields in entry["reports"]),
        objective=entry["objective"],
        failure=Failure(**failure) if failure else None,
        t_start=entry["t_start"],
        t_stop=entry["t_stop"],
        spent=Spent(*entry["spent"]),
        state_bytes=entry.get("state_bytes"),
    )


def encode_rung(result: RungResult) -> dict[str, Any]:
    """Fields of a ``rung`` entry."""
    return {
        "rung": result.rung,
        "start": result.start,
        "stop": result.stop,
        "evaluated": result.evaluated,
        "failed": result.failed,
        "promoted": list(result.promoted),
        "best": result.best,
    }


def decode_rung(entry: Entry) -> RungResult:
    """The rung's result of a ``rung`` entry."""
    return RungResult(
        rung=entry["rung"],
        start=entry["start"],
        stop=entry["stop"],
        evaluated=entry["evaluated"],
        failed=entry["failed"],
        promoted=tuple(entry["promoted"]),
        best=entry["best"],
    )
