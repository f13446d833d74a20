"""Writes an experiment, runs it as a user would, and reads what it left."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from mpihpo import Results
from mpihpo.results.encoding import parse_ranks
from mpihpo.results.journal import read_journal
from tests.launch import Mpi, Result, run_ranks

FUNCTIONS = Path(__file__).parent / "train_functions"
ON_FAKE_NODES = Path(__file__).parent / "on_fake_nodes.py"
_ONE_EPOCH = {"scheduler": "none", "max_epochs": 1}


@dataclass(frozen=True)
class Finished:
    """A job that has ended."""

    result: Result
    folder: Path

    @cached_property
    def results(self) -> Results:
        return Results(self.folder)

    @cached_property
    def journal(self) -> tuple[dict[str, Any], ...]:
        content = read_journal(self.folder / "journal.jsonl")
        assert content.problem is None
        return content.entries

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.journal if entry["kind"] == kind]

    @cached_property
    def configs(self) -> dict[int, dict[str, Any]]:
        return {entry["trial"]: entry["config"] for entry in self.entries("trial")}

    @cached_property
    def outcomes(self) -> list[dict[str, Any]]:
        """As in the journal, with lists for the ranks."""
        return [
            {
                **entry,
                **{name: parse_ranks(entry[name]) for name in ("ranks", "holders", "keepers")},
            }
            for entry in self.entries("outcome")
        ]

    @cached_property
    def failures(self) -> dict[int, dict[str, Any] | None]:
        """By trial."""
        return {entry["trial"]: entry["failure"] for entry in self.outcomes}

    @property
    def printed(self) -> str:
        """What rank 0 printed; no other rank may print, nor warn of anything but a lost peer.

        torch itself logs from C++ when a peer fails while it connects.
        """
        assert not any(self.result.outs[1:]), self.result.describe()
        lines = self.result.stderr.splitlines()
        assert all("Gloo connectFullMesh failed" in line for line in lines), self.result.describe()
        return self.result.outs[0]

    @property
    def output(self) -> str:
        """What rank 0 printed; no other rank may print, and nobody may warn."""
        assert not self.result.stderr, self.result.describe()
        return self.printed


def write_experiment(folder: Path, train: str | None, /, **sections: Any) -> Path:
    """An experiment of one epoch without torch, unless the sections say otherwise.

    Args:
        folder: Where the file goes.
        train: ``file:function`` in ``train_functions``; None: the sections say.
        **sections: Of the experiment; a plain mapping as ``space`` is searched as a grid.
    """
    content: dict[str, Any] = {
        "objective": {"metric": "loss"},
        "schedule": _ONE_EPOCH,
        "process_group": "none",
        "output": str(folder / "run"),
    }
    if train is not None:
        file, _, function = train.partition(":")
        content["train"] = f"{FUNCTIONS / file}.py:{function}"
    space = sections.pop("space", None)
    if space is not None:
        choices = {name: {"choices": list(values)} for name, values in space.items()}
        content["search"] = {"searcher": "grid", "space": choices}
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**content, **sections}, sort_keys=False))
    return path


def run_experiment(
    mpi: Mpi,
    ranks: int,
    folder: Path,
    train: str | None,
    /,
    *,
    options: Sequence[str] = (),
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    rc: int = 0,
    program: Sequence[str] = ("-m", "mpihpo"),
    **sections: Any,
) -> Finished:
    """Run an experiment (see `write_experiment`) to its end on so many ranks."""
    path = write_experiment(folder, train, **sections)
    arguments = [*program, "run", str(path), *options]
    result = run_ranks(mpi, ranks, arguments, timeout=timeout, env=env, cwd=folder, rc=rc)
    return Finished(result, folder / "run")


def without_ansi(text: str) -> str:
    """The text, which must have no control characters but newlines."""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    return text
