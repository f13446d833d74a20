"""Reads what an earlier job left in its folder, so that this one goes on."""

from __future__ import annotations

import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpihpo.errors import ExperimentError, ResultsError
from mpihpo.experiment import Experiment
from mpihpo.history import History
from mpihpo.records import Allocation, Ending, Outcome, TrialRecord, reached
from mpihpo.results.entries import (
    Provenance,
    decode_experiment,
    decode_outcome,
    decode_start,
    decode_trial,
)
from mpihpo.results.journal import JournalContent, read_journal
from mpihpo.runner.saved_state import saved_states, state_path
from mpihpo.settings import show
from mpihpo.yaml_file import parse_yaml

_MAY_CHANGE = ("limits", "allocation", "output", "process_group", "coordinator")
_MAY_CHANGE_KEYS = ("search.trials",)
_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """An earlier job, or several, in one folder."""

    provenance: Provenance | None
    """What the last job was started with; None: it is lost, or no job came that far."""
    train_digest: str | None
    history: History
    journal: JournalContent
    seconds: float
    """Job time up to the last entry."""


def read_run(directory: Path, journal: str, checkpoints: str) -> EarlierRun:
    """Read a run's journal and look which states are on the disk.

    Raises:
        ResultsError: There is no journal, or nothing of it can be used.
    """
    path = directory / journal
    content = read_journal(path)
    if not content.entries and b"\n" in path.read_bytes():
        raise ResultsError(f"{path}: every entry is lost, so it cannot be resumed")
    provenance: Provenance | None = None
    train_digest: str | None = None
    for entry in content.entries:
        if entry["kind"] in ("experiment", "resume"):
            provenance, train_digest = decode_experiment(entry), entry.get("train_digest")
    trials: dict[int, TrialRecord] = {}
    steps: list[Allocation | Outcome] = []
    saved: dict[int, dict[int, int]] = defaultdict(dict)
    seconds = 0.0
    for entry in content.entries:
        kind = entry["kind"]
        if kind == "trial":
            trials[entry["trial"]] = decode_trial(entry)
        elif kind == "start" and entry["trial"] in trials:
            steps.append(decode_start(entry, trials))
        elif kind == "outcome" and entry["trial"] in trials:
            outcome = decode_outcome(entry, trials)
            steps.append(outcome)
            seconds = max(seconds, outcome.t_stop)
            if entry.get("state") == "none" and outcome.ending is not Ending.FAILED:
                saved[entry["trial"]][reached(outcome)] = 0
        elif kind == "finish":
            seconds = max(seconds, entry["seconds"])
    for trial_id, epoch in saved_states(directory / checkpoints):
        path = state_path(directory / checkpoints, trial_id, epoch)
        saved[trial_id][epoch] = path.stat().st_size
    return EarlierRun(
        provenance=provenance,
        train_digest=train_digest,
        history=History(
            trials=trials,
            steps=steps,
            saved=saved,
        ),
        journal=content,
        seconds=seconds,
    )


def check_same(experiment: Experiment, train_digest: str | None, earlier: EarlierRun) -> None:
    """Refuse to go on with something else.

    Ranks, limits, allocation and the number of trials may change.

    Raises:
        ExperimentError: Names what differs, now and in the earlier run.
    """
    if earlier.provenance is None:
        if not earlier.journal.entries:  # killed before it had done anything
            return
        problem = "the journal has lost what its run was started with"
        raise ExperimentError("output", f"{problem}; --force resumes all the same")
    was = dict(_flat(parse_yaml(earlier.provenance.experiment_text, "journal")))
    now = dict(_flat(experiment.to_mapping()))
    differing = [
        key
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
        and key.split(".")[0] not in _MAY_CHANGE
        and key not in _MAY_CHANGE_KEYS
    ]
    if differing:
        shown = "; ".join(
            f"{key} is {show(now.get(key))}, was {show(was.get(key))}"
            for key in differing[:_MOST_SHOWN]
        )
        more = f" and {len(differing) - _MOST_SHOWN} more" if len(differing) > _MOST_SHOWN else ""
        where, _, rest = shown.partition(" ")
        raise ExperimentError(where, f"{rest}{more}; --force resumes all the same")
    if None not in (train_digest, earlier.train_digest) and train_digest != earlier.train_digest:
        problem = (
            f"the file of {experiment.train} has changed: its digest is {train_digest}, "
            f"was {earlier.train_digest}; --force resumes all the same"
        )
        raise ExperimentError("train", problem)


def digest_of(train: Callable[..., Any]) -> str | None:
    """Twelve hexadecimal digits for the file of a training function; None if it has none."""
    try:
        source = inspect.getsourcefile(inspect.unwrap(train))
        return None if source is None else _digest(Path(source).read_bytes())
    except (OSError, TypeError):
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _flat(mapping: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(mapping, Mapping) and mapping:
        for key, value in mapping.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, mapping
