"""Sizes of grouped products that are compiled for GPUs that are not here, and such tensors."""

from __future__ import annotations

import torch
from torch import Tensor

E, K, D, I = 8, 2, 512, 256  # noqa: E741
# Among names of activations.
PLAIN = "plain"
FORMATS = "formats"
TILES = "tiles"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")
