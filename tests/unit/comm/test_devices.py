"""Backend and GPU of a rank, over what a rank may see of its node."""

from __future__ import annotations

import pytest

from mpihpo.comm.devices import (
    DeviceChoice,
    Surroundings,
    agree_on_backend,
    choose_device,
    place_on_node,
)
from mpihpo.errors import ExperimentError

SHARED = "4 ranks of a node share 2 GPUs, so gloo is used, not NCCL"
HIDDEN = "each of a node's 4 ranks sees one GPU, so gloo is used, not NCCL"
ALONE = "each of a node's 4 ranks sees one GPU, NCCL fails if it is the same"


def surroundings(gpus: int, ranks: int, local: int, *, nccl: bool = True) -> Surroundings:
    return Surroundings(visible_gpus=gpus, ranks_on_node=ranks, local_rank=local, has_nccl=nccl)


@pytest.mark.parametrize(
    ("wanted", "gpus", "ranks", "local", "backend", "gpu", "warning"),
    [
        # A node without GPUs.
        ("auto", 0, 4, 3, "gloo", None, None),
        ("gloo", 0, 4, 3, "gloo", None, None),
        ("none", 0, 4, 3, None, None, None),
        # One rank per GPU, all visible.
        ("auto", 4, 4, 0, "nccl", 0, None),
        ("auto", 4, 4, 3, "nccl", 3, None),
        ("nccl", 4, 4, 3, "nccl", 3, None),
        ("gloo", 4, 4, 3, "gloo", 3, None),
        ("none", 4, 4, 3, None, None, None),
        # More GPUs than ranks.
        ("auto", 8, 2, 1, "nccl", 1, None),
        # One rank on the node: its only GPU is its own.
        ("auto", 1, 1, 0, "nccl", 0, None),
        ("nccl", 1, 1, 0, "nccl", 0, None),
        # One visible GPU and four ranks: hidden by the launcher, or shared.
        ("auto", 1, 4, 0, "gloo", 0, HIDDEN),
        ("auto", 1, 4, 3, "gloo", 0, HIDDEN),
        ("nccl", 1, 4, 3, "nccl", 0, ALONE),
        ("gloo", 1, 4, 3, "gloo", 0, None),
        # Fewer GPUs than ranks: shared, each by as many.
        ("auto", 2, 4, 0, "gloo", 0, SHARED),
        ("auto", 2, 4, 3, "gloo", 1, SHARED),
        ("gloo", 2, 4, 2, "gloo", 0, None),
    ],
)
def test_choice(
    wanted: str,
    gpus: int,
    ranks: int,
    local: int,
    backend: str | None,
    gpu: int | None,
    warning: str | None,
) -> None:
    choice = choose_device(wanted, surroundings(gpus, ranks, local))
    assert (choice.backend, choice.gpu) == (backend, gpu)
    if warning is None:
        assert choice.warning is None
    else:
        assert choice.warning is not None
        assert choice.warning.startswith(warning)
        assert "\n" not in choice.warning


def test_auto_without_nccl_uses_gloo_and_still_the_gpu() -> None:
    choice = choose_device("auto", surroundings(4, 4, 2, nccl=False))
    assert choice == DeviceChoice(backend="gloo", gpu=2)


@pytest.mark.parametrize(
    ("gpus", "ranks", "nccl", "said"),
    [
        (0, 1, True, "a rank sees none; expected auto or gloo"),
        (0, 4, True, "a rank sees none; expected auto or gloo"),
        (2, 4, True, "4 ranks of a node see 2 GPUs; expected auto or gloo"),
        (4, 5, True, "5 ranks of a node see 4 GPUs; expected auto or gloo"),
        (4, 4, False, "'nccl' is not part of this torch; expected auto, gloo or none"),
        (0, 4, False, "'nccl' is not part of this torch; expected auto, gloo or none"),
    ],
)
@pytest.mark.parametrize("local", [0, 1])
def test_nccl_that_cannot_work_is_refused_on_every_rank(
    gpus: int, ranks: int, nccl: bool, said: str, local: int
) -> None:
    with pytest.raises(ExperimentError) as caught:
        choose_device("nccl", surroundings(gpus, ranks, local, nccl=nccl))
    assert caught.value.where == "process_group"
    assert str(caught.value).endswith(said)
    assert "\n" not in str(caught.value)


def test_ranks_with_a_gpu_each_never_share_one() -> None:
    for ranks in range(1, 9):
        for gpus in range(ranks, 9):
            choices = [choose_device("auto", surroundings(gpus, ranks, i)) for i in range(ranks)]
            assert len({choice.gpu for choice in choices}) == ranks
            assert {choice.backend for choice in choices} == {"nccl"}


class TestAgreement:
    def test_what_all_chose(self) -> None:
        for backend in ("nccl", "gloo", None):
            assert agree_on_backend([DeviceChoice(backend=backend, gpu=None)] * 3) == backend

    def test_a_node_without_gpus_makes_all_use_gloo(self) -> None:
        with_gpu = [choose_device("auto", surroundings(2, 2, local)) for local in range(2)]
        without = [choose_device("auto", surroundings(0, 2, local)) for local in range(2)]
        assert agree_on_backend([*with_gpu, *without]) == "gloo"


class TestPlaceOnNode:
    @pytest.mark.parametrize(
        ("rank", "place"), [(0, (0, 2)), (1, (1, 2)), (2, (0, 3)), (3, (1, 3)), (4, (2, 3))]
    )
    def test_counts_from_0_on_each_node(self, rank: int, place: tuple[int, int]) -> None:
        assert place_on_node([0, 0, 1, 1, 1], rank, range(5)) == place

    def test_ranks_of_a_node_need_not_be_neighbours(self) -> None:
        assert [place_on_node([0, 1, 0, 1], rank, range(4)) for rank in range(4)] == [
            (0, 2),
            (0, 2),
            (1, 2),
            (1, 2),
        ]

    def test_a_coordinator_of_its_own_takes_no_gpu_from_the_four_that_train(self) -> None:
        training = range(1, 5)
        places = [place_on_node([0] * 5, rank, training) for rank in training]
        assert places == [(0, 4), (1, 4), (2, 4), (3, 4)]
        chosen = [choose_device("auto", surroundings(4, ranks, local)) for local, ranks in places]
        assert [(choice.backend, choice.gpu) for choice in chosen] == [
            ("nccl", 0),
            ("nccl", 1),
            ("nccl", 2),
            ("nccl", 3),
        ]
