"""Shapes of `quantize`."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(
    x_RD: Tensor, scale: Tensor | None = None, format: str = "float8_e4m3fn", group: int = -1
) -> tuple[Tensor, Tensor]:
    """[R, D] floats to ([R, D] in the format's dtype, float32 scales).

    The scales are [1, 1] for group = 0, [R, 1] for group = -1, else [R, ceil(D / group)].
    """
    R, D = x_RD.shape
    scale_shape = (1, 1) if group == 0 else (R, 1 if group < 0 else (D + group - 1) // group)
    q_RD = torch.empty((R, D), dtype=getattr(torch, format), device=x_RD.device)
    return q_RD, x_RD.new_empty(scale_shape, dtype=torch.float32)
