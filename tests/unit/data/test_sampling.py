"""Which samples each rank sees: once per epoch each, and the same per step for any width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpihpo.data.sampling import BatchShare
from mpihpo.errors import TrialError


def shares(
    samples: int,
    batch: int,
    world_size: int,
    *,
    seed: int = 5,
    epoch: int = 1,
    shuffle: bool = True,
) -> list[list[list[int]]]:
    """Indices by rank, step and place."""
    result = []
    for rank in range(world_size):
        share = BatchShare(
            samples, batch=batch, rank=rank, world_size=world_size, seed=seed, shuffle=shuffle
        )
        share.epoch = epoch
        steps = list(share)
        assert len(steps) == len(share)
        result.append(steps)
    return result


def global_steps(by_rank: list[list[list[int]]]) -> list[list[int]]:
    return [
        sorted(index for part in parts for index in part) for parts in zip(*by_rank, strict=True)
    ]


@given(
    samples=st.integers(1, 300), batch=st.integers(1, 64), k=st.integers(1, 9), seed=st.integers(0)
)
def test_every_sample_once_per_epoch_for_any_width(
    samples: int, batch: int, k: int, seed: int
) -> None:
    if min(samples, batch) < k:
        return
    by_rank = shares(samples, batch, k, seed=seed % 2**63)
    seen = [index for steps in by_rank for step in steps for index in step]
    assert sorted(seen) == list(range(samples))
    assert len({len(steps) for steps in by_rank}) == 1
    assert all(step for steps in by_rank for step in steps)


@given(samples=st.integers(8, 300), batch=st.integers(8, 64), epoch=st.integers(1, 20))
def test_a_step_sees_the_same_samples_for_any_width(samples: int, batch: int, epoch: int) -> None:
    # A last batch smaller than the widest group joins the one before it there: keep to those
    # that are shared alike.
    last = samples % batch
    if 0 < last < 8:
        samples += 8 - last
    alone = global_steps(shares(samples, batch, 1, epoch=epoch))
    for k in range(2, 9):
        assert global_steps(shares(samples, batch, k, epoch=epoch)) == alone


@pytest.mark.parametrize(
    ("samples", "batch", "k", "sizes"),
    [
        (10, 4, 1, [[4, 4, 2]]),
        (10, 4, 2, [[2, 2, 1], [2, 2, 1]]),
        # 2 samples left for 3 ranks: they join the batch before.
        (10, 4, 3, [[2, 2], [1, 2], [1, 2]]),
        (9, 4, 2, [[2, 3], [2, 2]]),
        (8, 4, 4, [[1, 1]] * 4),
        # One step only, smaller than the batch.
        (3, 8, 3, [[1]] * 3),
        (7, 8, 2, [[4], [3]]),
    ],
)
def test_last_partial_batch(samples: int, batch: int, k: int, sizes: list[list[int]]) -> None:
    assert [[len(step) for step in steps] for steps in shares(samples, batch, k)] == sizes


def test_order_depends_on_seed_and_epoch_only() -> None:
    first = shares(100, 10, 2, seed=1, epoch=1)
    assert shares(100, 10, 2, seed=1, epoch=1) == first
    assert shares(100, 10, 2, seed=2, epoch=1) != first
    assert shares(100, 10, 2, seed=1, epoch=2) != first


def test_without_shuffling_it_is_the_order_of_the_data_set() -> None:
    assert shares(6, 4, 2, shuffle=False, epoch=3) == [[[0, 2], [4]], [[1, 3], [5]]]


def test_iterating_twice_gives_the_same_until_the_epoch_changes() -> None:
    share = BatchShare(50, batch=8, rank=1, world_size=3, seed=9)
    first = list(share)
    assert list(share) == first
    share.epoch = 2
    assert list(share) != first


@pytest.mark.parametrize(
    ("samples", "batch", "k", "told"),
    [(100, 3, 4, "3 samples"), (2, 32, 4, "2 samples"), (0, 32, 1, "0 samples")],
)
def test_fewer_samples_in_a_step_than_ranks_is_refused(
    samples: int, batch: int, k: int, told: str
) -> None:
    with pytest.raises(TrialError, match=f"{told} per step cannot be shared by {k} ranks"):
        BatchShare(samples, batch=batch, rank=0, world_size=k, seed=1)
