"""Products on CPUs where calls have to be batch invariant and no kernel multiplies a format: each
row by itself, so that how a library sums depends on the sizes of a weight alone.

A weight is decoded to float32 some rows at a time, once for all rows that it multiplies; but a
library multiplies a vector at a time. So many rows take several times as long as in other calls.
Rows are copied: how libraries sum may depend on where in its memory a tensor begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends import reads
from moe_ops.backends.by_sequence import supports
from moe_ops.backends.cpu_codes import refusal_of_one_scale
from moe_ops.backends.dequantize import MOST_VALUES, blocks
from moe_ops.checks.shapes import DTYPES, wide
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall, decoded, quantized_linears
from moe_ops.kernels import cpu as kernels
from moe_ops.ops.expert_gemm import (
    ExpertGemmCall,
    checked_ends,
    decode_input,
    decode_weight,
    expert_gemm,
    of_rows,
)
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.quant.formats import ALL, Format
from moe_ops.quant.packing import row_blocks
from moe_ops.registry.backend import Rows
from moe_ops.registry.invariance import Refused

NAME = "by_row"


def arithmetic(call: Any) -> str:
    """How a row is computed: as if it were alone."""
    return NAME


# Behind whatever else gives a row the same bits, for any number of rows.
OPTIONS: dict[str, Any] = {
    "rows": Rows(preferred=lambda call: 0), "devices": ("cpu",), "priority": -1
}  # fmt: skip


@expert_gemm.backend(
    NAME, reads=reads.SCALED_GEMM, supports=supports, arithmetic=arithmetic, **OPTIONS
)
def multiply_rows(call: ExpertGemmCall) -> Tensor:
    """`expert_gemm` of one row after the other, in any format; slow for many rows."""
    x_RD = decode_input(call.x_RD, call.x_scale_RG, call.x_format)
    (R, D), F = x_RD.shape, call.w_EFD.shape[2 if call.transposed else 1]
    dtype = DTYPES[call.out_dtype] if call.out_dtype else call.x_RD.dtype
    y_RF = torch.empty(R, F, dtype=dtype)
    start = 0
    for e, end in enumerate(checked_ends(call.ends_E, R)):
        if end > start:
            rows = slice(start, end)
            y_RF[rows] = _finished(call, e, rows, _products(x_RD[rows], _weights(call, e, D), F))
        start = end
    return y_RF


def _products(x_RD: Tensor, weights: Iterator[tuple[slice, Tensor]], N: int) -> Tensor:
    """x Wᵀ in float32 [R, N], given the rows of W some at a time."""
    y_RN = torch.empty(x_RD.shape[0], N)
    for rows, w_ND in weights:
        for r in range(x_RD.shape[0]):
            y_RN[r, rows] = w_ND @ x_RD[r].clone()
    return y_RN


def _weights(call: ExpertGemmCall, e: int, D: int) -> Iterator[tuple[slice, Tensor]]:
    """The rows of an expert's weight in float32, as many at a time for any number of tokens."""
    w_FD, scales, zeros = call.w_EFD[e], call.w_scale_EFG, call.w_zero_EFG
    if call.transposed:
        w_FD = w_FD.t()
    down = Format.of(call.w_format).group[0] if call.w_format else 1
    for rows, groups in row_blocks(w_FD.shape[0], D, 1 if down == ALL else down, MOST_VALUES):
        groups = slice(None) if down == ALL else groups
        scale = None if scales is None else scales[e][groups]
        zero = None if zeros is None else zeros[e][groups]
        yield rows, decode_weight(w_FD[rows], scale, zero, call.w_format)


def _finished(call: ExpertGemmCall, e: int, rows: slice, y_RF: Tensor) -> Tensor:
    """An expert's products with factors and the bias, which are of each number by itself."""
    if call.global_scale_E is not None:
        y_RF *= of_rows(call.global_scale_E)[e]
    if call.x_global_scale_R is not None:
        y_RF *= call.x_global_scale_R[rows, None]
    if call.bias_EF is not None:
        y_RF += wide(call.bias_EF[e])
    return y_RF


@quantized_linears.backend(NAME, supports=supports, arithmetic=arithmetic, **OPTIONS)
def linear_rows(call: QuantizedLinearsCall) -> list[Tensor]:
    """`quantized_linears` of one row after the other, in any format; slow for many rows."""
    x_TK, outs = call.x_TK.float(), []
    for g, w_NK in enumerate(call.weights):
        weights = ((rows, decoded(part, 0)) for rows, part in blocks(call, g))
        y_TN, bias_N = _products(x_TK, weights, w_NK.shape[0]), call.biases[g]
        outs.append((y_TN if bias_N is None else y_TN + bias_N.float()).to(call.x_TK.dtype))
    return outs


def supports_experts(call: ExpertsCall) -> str | None:
    """Why a layer is not run by stages that each compute a row by itself, or None."""
    return supports(call) or kernels.unavailable()  # which copy rows, and activate and sum them


def arithmetic_of_experts(call: ExpertsCall) -> str:
    """That of the products, unless one scale is made of all tokens."""
    return Refused(why) if (why := refusal_of_one_scale(call)) else NAME


@experts.backend(
    NAME,
    reads=(*reads.SCALED_EXPERTS, *reads.CODES),
    supports=supports_experts,
    arithmetic=arithmetic_of_experts,
    **OPTIONS,
)
def experts_by_row(call: ExpertsCall) -> Tensor:
    """`experts` stage by stage, its products of one row after the other; slow for many tokens."""
    out_TD: Tensor = experts.body(call)
    return out_TD


experts.remembers(NAME)
for op in (expert_gemm, quantized_linears, experts):
    op.keeps_for_invariant(NAME)
