"""Quantised weights on the CPU: one expert, or some rows of a linear layer, are decoded to float32
at a time, and multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe_ops.checks.shapes import DTYPES
from moe_ops.decode_ops.quantized_linears import (
    QuantizedLinearsCall,
    decoded,
    linear_of,
    quantized_linears,
)
from moe_ops.ops.expert_gemm import (
    ExpertGemmCall,
    checked_ends,
    decode_input,
    decode_weight,
    expert_gemm,
    of_rows,
)
from moe_ops.quant.formats import ALL, Format
from moe_ops.quant.packing import row_blocks
from moe_ops.registry.gradients import needs_grad

READS = (
    "bias_EF", "x_scale_RG", "w_scale_EFG", "w_zero_EFG", "global_scale_E",
    "x_format", "w_format", "out_dtype", "x_global_scale_R",
)  # fmt: skip
MOST_VALUES = 1 << 21  # of a linear layer that are decoded at once, 8 MiB


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


def supports_linears(call: QuantizedLinearsCall) -> str | None:
    if needs_grad(call.x_TK, *call.scales, *call.biases):
        return "is not differentiable, and an argument requires grad"
    return None


@quantized_linears.backend("dequantize", supports=supports_linears, devices=("cpu",), priority=1)
def linears_by_blocks(call: QuantizedLinearsCall) -> list[Tensor]:
    """`quantized_linears` with a block of rows of a weight in float32 at a time."""
    x_TK, outs = call.x_TK.float(), []
    for g, w_NK in enumerate(call.weights):
        y_TN = call.x_TK.new_empty(x_TK.shape[0], w_NK.shape[0])
        for rows, part in blocks(call, g):
            y_TN[:, rows] = linear_of(x_TK, decoded(part, 0), part.biases[0]).to(y_TN.dtype)
        outs.append(y_TN)
    return outs


def blocks(call: QuantizedLinearsCall, g: int) -> Iterator[tuple[slice, QuantizedLinearsCall]]:
    """Rows of a weight, and the call of these alone: whole groups of rows, of MOST_VALUES at most
    unless a group has more."""
    down = Format.of(call.w_format).group[0]
    sizes = call.weights[g].shape[0], call.x_TK.shape[1]
    for rows, own in row_blocks(*sizes, 1 if down == ALL else down, MOST_VALUES):
        groups = slice(None) if down == ALL else own
        zero, bias = call.zeros[g], call.biases[g]
        yield (
            rows,
            replace(
                call,
                weights=[call.weights[g][rows]],
                scales=[call.scales[g][groups]],
                zeros=[None if zero is None else zero[groups]],
                global_scales=[call.global_scales[g]],
                biases=[None if bias is None else bias[rows]],
            ),
        )
