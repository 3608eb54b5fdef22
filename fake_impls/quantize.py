"""Shapes of `quantize`."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import parse


def quantize(
    x_RD: Tensor, format: str = "float8_e4m3fn:row", scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[R, D] floats to (packed values, scales), shapes and dtypes as the format says."""
    found = parse(format)
    R, D = x_RD.shape
    values = torch.empty((R, found.packed(D)), dtype=found.storage.dtype, device=x_RD.device)
    scales = torch.empty(found.scale_shape(R, D), dtype=found.scale_dtype, device=x_RD.device)
    return values, scales
