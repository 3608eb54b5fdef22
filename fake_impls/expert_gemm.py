"""Shapes of `expert_gemm`."""

from __future__ import annotations

from torch import Tensor


def expert_gemm(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """[R, D] rows and [E, F, D] weights ([E, D, F] if transposed) to [R, F] rows."""
    return x_RD.new_empty((x_RD.shape[0], w_EFD.shape[2 if transposed else 1]))
