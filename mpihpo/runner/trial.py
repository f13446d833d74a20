"""The trial handle: what a training function is given beside its configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mpihpo.data.sampling import BatchShare
from mpihpo.errors import (
    CheckpointError,
    MissingReportError,
    ObjectiveError,
    StateError,
    TrialError,
)
from mpihpo.records import Allocation, Objective, Report
from mpihpo.runner import state as states
from mpihpo.runner.batch import BatchPlan
from mpihpo.runner.handover import broadcast_parts
from mpihpo.runner.state import GENERATORS, KeptState, Part

if TYPE_CHECKING:
    from mpihpo.comm.group import Group
    from mpihpo.comm.interruptible import InterruptibleComm

T = TypeVar("T")


class Trial:
    """One trial on one rung, as the training function sees it, on one rank of its group.

    No attribute access communicates. Methods that do say so; every rank of the trial must then call
    them in the same order.
    """

    id: int
    """Number of the trial."""
    rung: int
    """Number of the rung, from 0."""
    seed: int
    """For random generators: the same on every rank and every rung of the trial."""
    start: int
    """Completed epochs before this call."""
    stop: int
    """Completed epochs after this call."""
    rank: int
    """This rank in the trial's group; 0 is the leader."""
    world_size: int
    """Ranks of the trial's group."""
    local_rank: int
    """This rank among those of its node that train."""
    device: Any
    """`torch.device` of this rank; the text ``cpu`` with ``process_group: none``."""
    directory: Path | None
    """Folder for the trial's own files, the same on every rung; None where nothing is written."""
    arguments: Mapping[str, Any]
    """The experiment's ``arguments``."""
    global_batch_size: int
    """Samples per step over the whole group."""
    per_rank_batch_size: int
    """Samples per step on a rank; of uneven shares the largest."""
    lr_scale: float
    """Factor for the learning rate, by ``batch.lr_scaling``."""

    def __init__(
        self,
        *,
        allocation: Allocation,
        group: Group,
        objective: Objective,
        batch: BatchPlan,
        device: Any,
        local_rank: int,
        directory: Path | None,
        arguments: Mapping[str, Any],
        cache: dict[str, Any],
        kept: KeptState | None,
        is_last_epoch: Callable[[int, float], bool],
        on_report: Callable[[Report], None],
    ) -> None:
        evaluation = allocation.evaluation
        self.id, self.rung = evaluation.trial.id, evaluation.rung
        self.seed = evaluation.trial.seed
        self.start, self.stop = evaluation.start, evaluation.stop
        self.rank, self.world_size, self.local_rank = group.rank, group.size, local_rank
        self.device, self.directory, self.arguments = device, directory, arguments
        self.global_batch_size = batch.global_size
        self.per_rank_batch_size = batch.per_rank_size
        self.lr_scale = batch.lr_scale
        self._group = group
        self._objective = objective
        self._cache = cache
        self._kept = kept
        self._sources = [
            group.ranks.index(rank) for rank in allocation.holders if rank in group.ranks
        ]
        self._is_last_epoch, self._on_report = is_last_epoch, on_report
        self._attached: dict[str, Any] = {}
        self._samplers: list[BatchShare] = []
        self._reports: dict[int, Report] = {}
        self._epoch = self._completed = self.start
        self._uses_epochs = False
        self._entered = time.perf_counter()
        self._restore_seconds = 0.0
        self._is_interrupted = False

    def __repr__(self) -> str:
        """The line to have in a log."""
        return (
            f"<Trial {self.id} rung {self.rung} epochs {self.start + 1}-{self.stop} "
            f"rank {self.rank}({self.world_size})>"
        )

    @property
    def comm(self) -> InterruptibleComm:
        """An `mpi4py.MPI.Intracomm` over the trial's ranks; freed after the training function."""
        return self._group.comm

    # State.

    def attach(self, **objects: Any) -> None:
        """Name what makes up the trial's state; it is restored here and kept at the rung's end.

        If the trial ran before, its state is loaded into the objects now, on every rank. If not,
        the leader's is, so that all ranks start from the same. Global random generators continue
        where the leader's were.

        Collective over the trial's ranks, with the same names on all of them.

        Args:
            **objects: Anything with ``state_dict`` and ``load_state_dict`` (modules, optimizers, lr
                schedulers, own classes), numpy arrays and tensors (restored in place).

        Raises:
            StateError: An object has no state, a name is given twice, or what was kept does not
            fit.
        """
        began = time.perf_counter()
        for name, thing in objects.items():
            states.check_attachable(name, thing)
            if name in self._attached:
                raise StateError(f"attach({name}=...): this name is attached already")
        first = not self._attached
        self._attached |= objects
        parts = self._shared_parts(objects, with_generators=first and self.start > 0)
        if self.start > 0 or self.rank != 0:
            for name, thing in objects.items():
                # Loading may keep the tensors it is given, and training must not change what is
                # kept.
                is_kept = self._kept is not None and parts[name] is self._kept.parts.get(name)
                states.put_back(name, thing, parts[name].copied() if is_kept else parts[name])
        if GENERATORS in parts:
            states.put_back_generators(parts[GENERATORS])
        self._restore_seconds += time.perf_counter() - began

    def _shared_parts(
        self, objects: Mapping[str, Any], *, with_generators: bool
    ) -> dict[str, Part]:
        """The parts to load, on every rank; collective over the trial's ranks."""
        source = 0
        parts: dict[str, Part] | None = None
        if self.start > 0:
            source = self._sources[0] if self._sources else 0
            if self.rank == source:
                parts = self._kept_parts(objects, with_generators=with_generators)
        elif self.world_size > 1 and self.rank == source:
            parts = {name: states.take(thing, copy=False) for name, thing in objects.items()}
        if self.world_size > 1:
            return broadcast_parts(self._group, parts, source, self.device)
        return parts or {}

    def _kept_parts(self, objects: Mapping[str, Any], *, with_generators: bool) -> dict[str, Part]:
        if self._kept is None:
            name = next(iter(objects), "...")
            problem = f"its state after epoch {self.start} is not on the disk"
            raise CheckpointError(f"attach({name}=...): {problem}")
        missing = [name for name in objects if name not in self._kept.parts]
        if missing:
            known = ", ".join(name for name in self._kept.parts if name != GENERATORS)
            raise StateError(
                f"attach({missing[0]}=...): nothing was kept under this name; "
                f"kept: {known or 'nothing'}"
            )
        names = [*objects, *([GENERATORS] if with_generators else [])]
        return {name: self._kept.parts[name] for name in names}

    def _take_state(self) -> KeptState:
        """A copy of everything attached; local."""
        parts = {name: states.take(thing, copy=True) for name, thing in self._attached.items()}
        if parts:
            parts[GENERATORS] = states.take_generators()
        return KeptState(self.id, self._completed, parts)

    def cache(self, key: str, factory: Callable[[], T]) -> T:
        """What ``factory()`` made for ``key``, kept in this process across trials; local.

        For what is expensive to make and does not change: a data set that was read, say.
        """
        if key not in self._cache:
            self._cache[key] = factory()
        kept: T = self._cache[key]
        return kept

    # Training.

    def ddp(self, model: Any, **options: Any) -> Any:
        """The model as `DistributedDataParallel` over the trial's ranks; itself on one rank.

        Collective over the trial's ranks.

        Args:
            model: A module on ``trial.device``.
            **options: For `DistributedDataParallel`.
        """
        if self.world_size == 1:
            return model
        if self._group.backend is None:
            raise TrialError(
                "trial.ddp needs a process group; the experiment says process_group: none"
            )
        from torch.nn.parallel import DistributedDataParallel

        # An attached model is the same on all ranks by now: no second broadcast.
        if any(model is thing for thing in self._attached.values()):
            options.setdefault("init_sync", False)
        if {parameter.device for parameter in model.parameters()} == {self.device}:
            index = self.device.index  # None on the CPU, where device_ids must not be given
            options.setdefault("device_ids", None if index is None else [index])
        return DistributedDataParallel(model, **options)

    def loader(self, dataset: Any, *, shuffle: bool = True, **options: Any) -> Any:
        """A `torch.utils.data.DataLoader` over this rank's share of a map-style data set; local.

        Each global step takes the next ``global_batch_size`` samples of an order that depends on
        the trial's seed and the epoch only. All ranks have the same number of steps.

        Args:
            dataset: With ``len()`` and integer indexing.
            shuffle: False: in the order of the data set.
            **options: For `DataLoader`.

        Raises:
            TrialError: A step has fewer samples than the trial has ranks.
        """
        from torch.utils.data import DataLoader

        sampler = BatchShare(
            len(dataset),
            batch=self.global_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            shuffle=shuffle,
        )
        sampler.epoch = max(self._epoch, self.start + 1)
        self._samplers.append(sampler)
        return DataLoader(dataset, batch_sampler=sampler, **options)

    def epochs(self) -> Iterator[int]:
        """The epochs to train, from ``start + 1`` to ``stop``; fewer when the job's time runs out.

        Collective over the trial's ranks: all of them leave at the same epoch.

        Raises:
            MissingReportError: On the leader, after an epoch without a report of the objective.
        """
        self._uses_epochs = True
        seconds = 0.0
        for epoch in range(self.start + 1, self.stop + 1):
            if self._is_last_epoch(epoch - 1, seconds):
                self._is_interrupted = True
                return
            began = time.perf_counter()
            self._begin_epoch(epoch)
            yield epoch
            self._check_report(epoch)
            self._completed = epoch
            seconds = time.perf_counter() - began

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for sampler in self._samplers:
            sampler.epoch = epoch

    def report(self, epoch: int, **metrics: Any) -> None:
        """Report the metrics of an epoch; local. The leader's values count.

        Args:
            epoch: The epoch that has just been trained, counted from 1.
            **metrics: Numbers by name, the objective among them.

        Raises:
            ObjectiveError: On the leader, if a metric is no number or the objective is not finite.
            TrialError: The epoch is not one of this evaluation's, or goes backwards.
        """
        self._group.check()
        first = max(self._reports, default=self.start + 1)
        if not first <= epoch <= self.stop:
            raise TrialError(f"report({epoch}): expected an epoch from {first} to {self.stop}")
        if self.rank != 0:
            self._reports[epoch] = Report(epoch, {}, 0.0)
            return
        numbers = {name: _number(name, value, epoch) for name, value in metrics.items()}
        objective = numbers.get(self._objective.metric)
        if objective is not None and not math.isfinite(objective):
            raise ObjectiveError(f"epoch {epoch}: {self._objective.metric} is {objective}")
        earlier = self._reports.get(epoch)
        merged = numbers if earlier is None else {**earlier.metrics, **numbers}
        report = Report(epoch, merged, time.perf_counter() - self._entered)
        self._reports[epoch] = report
        self._on_report(report)

    def mean(self, value: Any, weight: float = 1.0) -> float:
        """The mean of a number over the trial's ranks, weighted; the same on all ranks.

        Collective over the trial's ranks.

        Args:
            value: A number or a tensor with one element; ignored where ``weight`` is 0.
            weight: Of this rank's value, such as its number of samples.

        Raises:
            TrialError: All weights are 0.
        """
        weight = float(weight)
        number = float(value) if weight else 0.0
        total, weights = number * weight, weight
        if self.world_size > 1:
            total, weights = self._sum(total, weights)
        if not weights:
            raise TrialError("trial.mean: the weights of all ranks are 0; expected a positive one")
        return number if self.world_size == 1 else total / weights

    def _sum(self, *numbers: float) -> list[float]:
        if self._group.backend is None:
            import numpy as np
            from mpi4py import MPI

            result = np.empty(len(numbers))
            self.comm.Allreduce(np.array(numbers), result, MPI.SUM)
            values: list[float] = result.tolist()
            return values
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    # After the training function.

    def _check_report(self, epoch: int) -> None:
        name = self._objective.metric
        if self.rank == 0:
            report = self._reports.get(epoch)
            if report is None or name not in report.metrics:
                raise MissingReportError(
                    f"epoch {epoch} ended without trial.report({epoch}, {name}=...)"
                )

    def _finish(self) -> None:
        """Check that the training function did all it had to; local."""
        if self._is_interrupted:
            return
        for epoch in range(self.start + 1, self.stop + 1):
            self._check_report(epoch)
        if self._uses_epochs and self._completed < self.stop:
            # Its peers may wait for it in a collective for ever.
            raise TrialError(
                f"rank {self.rank} of the trial left trial.epochs() in epoch {self._epoch} of "
                f"{self.stop}; expected all ranks to go on to the last one"
            )
        self._completed = self.stop


def _number(name: str, value: Any, epoch: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        shown = " ".join(repr(value).split())[:60]
        raise ObjectiveError(f"epoch {epoch}: {name} is {shown}, not a number") from None
