"""Shapes of `expert_gemm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def expert_gemm(call: Any) -> Tensor:
    """[R, D] rows and [E, F, D] weights ([E, D, F] if transposed) to [R, F] rows of out_dtype."""
    x_RD, columns = call.x_RD, call.w_EFD.shape[2 if call.transposed else 1]
    dtype = getattr(torch, call.out_dtype) if call.out_dtype else x_RD.dtype
    out: Tensor = x_RD.new_empty((x_RD.shape[0], columns), dtype=dtype)
    return out
