"""Is imported by a training function's file beside it."""

from __future__ import annotations

import torch

SAMPLES = 16


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        return torch.full((4,), float(index))
