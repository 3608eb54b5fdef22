"""Quantised weights on the CPU: one expert at a time is decoded to float32 and multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.gradients import needs_grad
from moe_ops.ops.expert_gemm import checked_ends, decode_input, decode_weight, expert_gemm
from moe_ops.shapes import DTYPES


def supports(
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
) -> str | None:
    if not w_format:
        return "needs quantised weights"
    if needs_grad(x_RD, bias_EF, w_scale_EFG, alpha_E):
        return "is not differentiable, and an argument requires grad"
    return None


@expert_gemm.backend("dequantize", supports=supports, devices=("cpu",))
def multiply_decoded(
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
    """`expert_gemm` with one float32 expert in memory; reads which experts have rows."""
    x = decode_input(x_RD, x_scale_RG, x_format)
    dtype = DTYPES[out_dtype] if out_dtype else x_RD.dtype
    y_RF = torch.empty(x.shape[0], w_EFD.shape[1], dtype=dtype, device=x.device)
    start = 0
    for e, end in enumerate(checked_ends(ends_E, x.shape[0])):
        if end > start:
            scale = None if w_scale_EFG is None else w_scale_EFG[e]
            zero = None if w_zero_EFG is None else w_zero_EFG[e]
            y = x[start:end] @ decode_weight(w_EFD[e], scale, zero, w_format).T
            if alpha_E is not None:
                y *= alpha_E[e]
            if bias_EF is not None:
                y += bias_EF[e].float()
            y_RF[start:end] = y.to(dtype)
        start = end
    return y_RF
