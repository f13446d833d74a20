"""Which samples each rank sees: one global order per epoch, shared out step by step.

The order depends on the trial's seed and the epoch only. Each global step takes the next ``batch``
samples of it, and rank r of k takes every k-th of these, from the r-th on. So every sample is seen
once per epoch and a step sees the same samples for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpihpo.errors import TrialError


class BatchShare:
    """This rank's share of each global batch: a batch sampler for `torch.utils.data.DataLoader`.

    All ranks have the same number of steps, and each has at least one sample in every step: a last
    batch with fewer samples than ranks joins the one before it.

    Args:
        samples: Size of the data set.
        batch: Samples per step over all ranks.
        rank: This rank in its trial's group.
        world_size: Ranks of the group.
        seed: The trial's seed.
        shuffle: False: in the order of the data set.

    Raises:
        TrialError: A step has fewer samples than there are ranks.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        if min(samples, batch) < world_size:
            raise TrialError(
                f"{min(samples, batch)} samples per step cannot be shared by {world_size} ranks: "
                f"raise batch.size or lower allocation.max_ranks"
            )
        self._samples = samples
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle = seed, shuffle
        self.epoch = 1
        """The epoch whose order is used next, counted from 1."""
        starts = list(range(0, samples, batch))
        if len(starts) > 1 and samples - starts[-1] < world_size:
            starts.pop()
        self._bounds = [*starts, samples]

    def __len__(self) -> int:
        """Steps per epoch, the same on all ranks."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of this rank's samples, step by step."""
        order = np.arange(self._samples)
        if self._shuffle:
            counter = np.random.Philox(key=[self._seed, self.epoch])
            order = np.random.Generator(counter).permutation(self._samples)
        for start, stop in zip(self._bounds, self._bounds[1:]):  # noqa: B905 - pairs
            yield order[start + self._rank : stop : self._world_size].tolist()
