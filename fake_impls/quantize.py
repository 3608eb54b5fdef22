"""Shapes of `quantize`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .formats import parse


def quantize(call: Any) -> tuple[Tensor, Tensor]:
    """[R, D] floats to (packed values, scales), shapes and dtypes as the format says."""
    found, x_RD = parse(call.format), call.x_RD
    R, D = x_RD.shape
    values = torch.empty((R, found.packed(D)), dtype=found.storage.dtype, device=x_RD.device)
    scales = torch.empty(found.scale_shape(R, D), dtype=found.scale_dtype, device=x_RD.device)
    return values, scales
