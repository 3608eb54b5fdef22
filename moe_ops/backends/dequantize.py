"""Quantised weights on the CPU: one expert at a time is decoded to float32 and multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.checks.shapes import DTYPES
from moe_ops.ops.expert_gemm import (
    ExpertGemmCall,
    checked_ends,
    decode_input,
    decode_weight,
    expert_gemm,
    of_rows,
)
from moe_ops.registry.gradients import needs_grad

READS = (
    "bias_EF", "x_scale_RG", "w_scale_EFG", "w_zero_EFG", "global_scale_E",
    "x_format", "w_format", "out_dtype", "x_global_scale_R",
)  # fmt: skip


def supports(call: ExpertGemmCall) -> str | None:
    if not call.w_format:
        return "needs quantised weights"
    if needs_grad(call.x_RD, call.bias_EF, call.w_scale_EFG, call.global_scale_E):
        return "is not differentiable, and an argument requires grad"
    return None


@expert_gemm.backend("dequantize", reads=READS, supports=supports, devices=("cpu",))
def multiply_decoded(call: ExpertGemmCall) -> Tensor:
    """`expert_gemm` with one float32 expert in memory; reads which experts have rows."""
    w_EFD, scales, zeros = call.w_EFD, call.w_scale_EFG, call.w_zero_EFG
    x = decode_input(call.x_RD, call.x_scale_RG, call.x_format)
    dtype = DTYPES[call.out_dtype] if call.out_dtype else call.x_RD.dtype
    y_RF = torch.empty(x.shape[0], w_EFD.shape[1], dtype=dtype, device=x.device)
    factor_E = None if call.global_scale_E is None else of_rows(call.global_scale_E)
    start = 0
    for e, end in enumerate(checked_ends(call.ends_E, x.shape[0])):
        if end > start:
            scale = None if scales is None else scales[e]
            zero = None if zeros is None else zeros[e]
            y = x[start:end] @ decode_weight(w_EFD[e], scale, zero, call.w_format).T
            if factor_E is not None:
                y *= factor_E[e]
            if call.x_global_scale_R is not None:
                y *= call.x_global_scale_R[start:end, None]
            if call.bias_EF is not None:
                y += call.bias_EF[e].float()
            y_RF[start:end] = y.to(dtype)
        start = end
    return y_RF
