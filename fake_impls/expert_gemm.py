"""Shapes of `expert_gemm`."""

from __future__ import annotations

import torch
from torch import Tensor


def expert_gemm(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None = None,
    transposed: bool = False,
    x_scale_RG: Tensor | None = None,
    w_scale_EFG: Tensor | None = None,
    w_zero_EFG: Tensor | None = None,
    alpha_E: Tensor | None = None,
    x_format: str = "",
    w_format: str = "",
    out_dtype: str = "",
) -> Tensor:
    """[R, D] rows and [E, F, D] weights ([E, D, F] if transposed) to [R, F] rows of out_dtype."""
    dtype = getattr(torch, out_dtype) if out_dtype else x_RD.dtype
    return x_RD.new_empty((x_RD.shape[0], w_EFD.shape[2 if transposed else 1]), dtype=dtype)
