"""Rows as codes of float8_e4m3fn with a scale for each group of columns, for products with weights
of four bits (`grouped_float8_tokens.py`), in the order of `in_float8_order`.

Scales lie as [rows, groups of 32 columns], in float32: those of mxfp8, too, which are powers of
two; one of more columns lies there once for each 32. Codes are those of `quantize`, bit for bit,
but in groups whose scale is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Inputs
from moe_ops.kernels.triton.experts.formats.order import in_float8_order, padded_groups
from moe_ops.kernels.triton.experts.operands.fake_quantized import rounded, scales_of_groups
from moe_ops.kernels.triton.experts.operands.group_scales import to_float8
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

TOKENS, COLUMNS = 16, 256  # of a program: whole steps, so that all scales are written


@triton.jit(do_not_specialize=["T"])
def quantize_groups_kernel(
    x_ptr, inverse_ptr, codes_ptr, scale_ptr, stride_x, stride_scale, T,
    K: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr,
    E8M0: tl.constexpr, LARGEST: tl.constexpr, TOP: tl.constexpr, ARRANGED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BD columns of BT rows, written where they were, or to each of the K rows of
    their token. ARRANGED: whether to arrange them, which h is already."""
    G: tl.constexpr = BD // GROUP
    EACH: tl.constexpr = GROUP // 32
    take_turn(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = (t < T)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + t.to(tl.int64)[:, None] * stride_x + d[None, :], mask=inside, other=0.0)
    x = tl.reshape(x, (BT * G, GROUP))
    if E8M0:
        x = x.to(tl.float32)
        scale, ratio = scales_of_groups(x, 1.0, LARGEST, TOP, "e8m0")
        value = x * ratio[:, None]
        # The scale of a group with a NaN is one.
        value = rounded(tl.where(value == value, value, 0.0), -6, 3, LARGEST)
        codes = value.to(tl.float8e4nv)
    else:
        codes, scale = to_float8(x)
    codes = tl.reshape(codes, (BT, BD))
    if ARRANGED:
        codes = in_float8_order(codes)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], (BT * G, EACH)), (BT, BD // 32))
    g = tl.program_id(1) * (BD // 32) + tl.arange(0, BD // 32)
    for k in range(K):
        row = t
        if inverse_ptr is not None:
            row = tl.load(inverse_ptr + t * K + k, mask=t < T, other=-1)
        there = ((t < T) & (row >= 0))[:, None]
        tl.store(codes_ptr + row.to(tl.int64)[:, None] * D + d[None, :], codes, there & inside)
        tl.store(scale_ptr + row.to(tl.int64)[:, None] * stride_scale + g[None, :], scale, there)


def quantize_groups(
    x_TD: Tensor, inputs: Inputs, inverse_R: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """(codes [R, D], scales [R, groups], which is a multiple of 8): of tokens, arranged, in the
    rows of their pairs (`sort_pairs`), of which those of no pair stay unwritten; or of rows of h,
    which are arranged already.
    """
    T, D = x_TD.shape
    R = T if inverse_R is None else inverse_R.numel()
    codes_RD = x_TD.new_empty(R, D, dtype=torch.float8_e4m3fn)
    scale_RG = x_TD.new_empty(R, padded_groups(D), dtype=torch.float32)
    launch(
        quantize_groups_kernel, (triton.cdiv(T, TOKENS), triton.cdiv(D, COLUMNS)),
        x_TD, inverse_R, codes_RD, scale_RG, x_TD.stride(0), scale_RG.stride(0), T,
        K=1 if inverse_R is None else top_k, D=D, BT=TOKENS, BD=COLUMNS, GROUP=inputs.group,
        E8M0=inputs.scale == "e8m0", LARGEST=inputs.largest, TOP=inputs.top,
        ARRANGED=inverse_R is not None, num_warps=4, **pdl_options(x_TD),
    )  # fmt: skip
    return codes_RD, scale_RG
