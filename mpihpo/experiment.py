"""The experiment: experiment.yaml in typed, validated and frozen form.

Each section is a settings class that lives beside what it configures and validates itself; this
module composes them, reads them from YAML and writes the effective experiment back.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpihpo.allocation import AllocationSettings, build_policy
from mpihpo.errors import ExperimentError
from mpihpo.limits import Limits
from mpihpo.records import Objective
from mpihpo.schedule import ScheduleSettings
from mpihpo.search import SearchSettings
from mpihpo.settings import (
    accept_mapping,
    check_choice,
    check_integer,
    check_text,
    from_mapping,
    show,
    to_mapping,
)
from mpihpo.train_function import TRAIN_FORM, find_modules_in, load_train
from mpihpo.yaml_file import read_yaml, write_yaml

__all__ = [
    "BatchSettings",
    "Experiment",
    "Limits",
    "load_experiment",
    "load_train",
]

_DEEPEST = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How many samples a step takes, and what becomes of it when a trial gets more ranks."""

    size: int = 32
    """Samples per step over the whole group of a trial on the first rung."""
    on_resize: str = "keep_global"
    """``keep_global``: more ranks share the batch; ``keep_per_rank``: each keeps its share of the
    first rung, and the batch grows with the ranks."""
    lr_scaling: str = "none"
    """``none``, ``linear`` or ``sqrt``: how the rate follows a batch that grows."""

    def __post_init__(self) -> None:
        """Check each value."""
        check_integer(self.size, "batch.size", least=1)
        check_choice(self.on_resize, ("keep_global", "keep_per_rank"), "batch.on_resize")
        check_choice(self.lr_scaling, ("none", "linear", "sqrt"), "batch.lr_scaling")
        if self.lr_scaling != "none" and self.on_resize != "keep_per_rank":
            problem = f"{self.lr_scaling!r} needs on_resize: keep_per_rank, where the batch grows"
            raise ExperimentError("batch.lr_scaling", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Everything that decides what a job does; sections may be given as plain mappings.

    Raises:
        ExperimentError: Names the dotted key, the value and what would be right.
    """

    train: str | None = None
    """``module:function`` or ``path/to/file.py:function``; None where a function is handed in."""
    objective: Objective
    """Which reported metric decides, and which way."""
    search: SearchSettings
    """What to try."""
    schedule: ScheduleSettings
    """How far."""
    allocation: AllocationSettings = field(default_factory=AllocationSettings)
    """On how many ranks."""
    seed: int = 0
    """Decides all configurations and each trial's seed."""
    batch: BatchSettings = field(default_factory=BatchSettings)
    """Samples per step."""
    limits: Limits = field(default_factory=Limits)
    """When to stop."""
    process_group: str = "auto"
    """Backend inside a trial: ``auto``, ``nccl``, ``gloo`` or ``none`` (torch is then unused)."""
    coordinator: str = "auto"
    """``dedicated``: world rank 0 only coordinates; ``auto``: it trains too."""
    output: str | None = None
    """Folder of the results, relative to the working directory."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for the training function, as ``trial.arguments``."""

    def __post_init__(self) -> None:
        """Check each value."""
        if self.train is not None:
            check_text(self.train, "train", TRAIN_FORM)
        accept_mapping(self, "objective", Objective)
        metric = self.objective.metric
        check_text(metric, "objective.metric", "the name of a reported metric")
        check_choice(self.objective.mode, ("min", "max"), "objective.mode")
        # Python does this to names of arguments, as which metrics are reported.
        normal = replace(self.objective, metric=unicodedata.normalize("NFKC", metric))
        object.__setattr__(self, "objective", normal)
        accept_mapping(self, "search", SearchSettings)
        accept_mapping(self, "schedule", ScheduleSettings)
        accept_mapping(self, "allocation", AllocationSettings)
        accept_mapping(self, "batch", BatchSettings)
        accept_mapping(self, "limits", Limits, Limits.from_mapping)
        check_integer(self.seed, "seed", least=0)
        check_choice(self.process_group, ("auto", "nccl", "gloo", "none"), "process_group")
        check_choice(self.coordinator, ("auto", "dedicated"), "coordinator")
        if self.output is not None:
            check_text(self.output, "output", "a folder")
        object.__setattr__(self, "arguments", _arguments(self.arguments))

    @classmethod
    def from_mapping(cls, mapping: object) -> Experiment:
        """Build from plain mappings, as YAML gives them.

        Raises:
            ExperimentError: Names the dotted key, the value and what would be right.
        """
        return from_mapping(cls, mapping, "")

    def to_mapping(self) -> dict[str, Any]:
        """The plain mappings that give this experiment, defaults written out."""
        sections = to_mapping(self)
        for name in ("objective", "schedule", "allocation", "batch"):
            sections[name] = to_mapping(sections[name])
        sections["search"] = self.search.to_mapping()
        sections["limits"] = self.limits.to_mapping()
        return {name: value for name, value in sections.items() if value != {}}

    def to_yaml(self) -> str:
        """The effective experiment as YAML; reading it gives an equal experiment."""
        return write_yaml(self.to_mapping())

    def training_ranks(self, ranks: int) -> int:
        """How many of a job's ranks train.

        Args:
            ranks: Size of the world.
        """
        return len(self.training_range(ranks))

    def training_range(self, ranks: int) -> range:
        """Which of a job's ranks train.

        Args:
            ranks: Size of the world.
        """
        return range(1 if self.coordinator == "dedicated" else 0, ranks)

    def check_world(self, ranks: int) -> None:
        """Refuse a world that is too small.

        Args:
            ranks: Size of the world.

        Raises:
            ExperimentError: No rank is left to train, or fewer than a trial asks for.
        """
        training = self.training_ranks(ranks)
        if training < 1:
            problem = f"'dedicated' needs a rank more than those that train; the job has {ranks}"
            raise ExperimentError("coordinator", problem)
        build_policy(
            self.allocation,
            reduction_factor=self.schedule.reduction_factor,
            world_size=training,
        )


def load_experiment(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Experiment:
    """The experiment in a YAML file; local to each rank.

    Args:
        path: The file.
        overrides: ``a.b.c=value`` each, with the value in YAML; they go before the file's values.

    Raises:
        ExperimentError: Names the dotted key (or the file and line), the value and what would be
            right.
    """
    find_modules_in(Path(path).parent)  # classes that the experiment names
    return Experiment.from_mapping(read_yaml(Path(path), overrides))


def _arguments(given: object) -> dict[str, Any]:
    if not isinstance(given, (Mapping, type(None))):
        problem = f"{show(given)} is not a section; expected name: value"
        raise ExperimentError("arguments", problem)
    copied: dict[str, Any] = _plain(given or {}, "arguments", 0)
    return copied


def _plain(value: Any, where: str, depth: int) -> Any:
    """A copy made of what YAML can write, so that the effective experiment is complete."""
    if depth > _DEEPEST:
        raise ExperimentError(where.split(".")[0], "nested too deeply, or in a circle")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ExperimentError(where, f"the name {show(key)} is not a text; quote it")
        return {key: _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}.{k}", depth + 1) for k, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    problem = f"{show(value)} is not plain; expected text, numbers, true, false, null and lists"
    raise ExperimentError(where, problem)
