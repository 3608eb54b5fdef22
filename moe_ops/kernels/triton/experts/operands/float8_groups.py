"""Rows as codes of float8 with a scale for each group of columns, as weights of four bits meet them
in `grouped_float8_tokens.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.experts.formats.codes import POWERS, Codes
from moe_ops.kernels.triton.experts.formats.float8 import LARGEST_CODE
from moe_ops.kernels.triton.experts.formats.order import in_float8_order, place_in_stages
from moe_ops.kernels.triton.experts.operands.fake_quantized import scales_of_groups
from moe_ops.kernels.triton.experts.operands.group_scales import to_float8
from moe_ops.kernels.triton.experts.products import float8_tile
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.quantize import as_float8, saturated
from moe_ops.kernels.triton.replay import launch

ROWS, COLUMNS = 16, float8_tile.COLUMNS // 2  # of a program
TOP = tl.constexpr(8)  # the exponent of the largest code


@triton.jit
def by_powers(x):
    """(codes, scales) of mxfp8 of rows of x, as `quantize` makes them; scales as numbers."""
    scale, ratio = scales_of_groups(x, 1.0, LARGEST_CODE, TOP, "e8m0")
    return as_float8(saturated(x * ratio[:, None], LARGEST_CODE)), scale


@triton.jit(do_not_specialize=["T"])
def quantize_in_order_kernel(
    x_ptr, inverse_ptr, codes_ptr, scale_ptr, stride_x, stride_scale, T,
    K: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr,
    BY_POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BD columns of BT tokens, in the order of `in_float8_order`, written to each of
    their rows; or of rows that have this order, in their places. Groups past the last column have a
    scale, too."""
    GROUPS: tl.constexpr = BD // GROUP
    take_turn(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)[None, :]
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
    here = (t < T)[:, None]
    x = tl.load(x_ptr + t.to(tl.int64)[:, None] * stride_x + d, mask=here & (d < D), other=0.0)
    x = tl.reshape(x.to(tl.float32), (BT * GROUPS, GROUP))
    if BY_POWERS:
        codes, scale = by_powers(x)
    else:
        codes, scale = to_float8(x)
    codes, scale = tl.reshape(codes, (BT, BD)), tl.reshape(scale, (BT, GROUPS))
    if inverse_ptr is not None:
        codes = in_float8_order(codes)
    for k in range(K):
        row = t
        if inverse_ptr is not None:
            row = tl.load(inverse_ptr + t * K + k, mask=t < T, other=-1)
        there = here & (row >= 0)[:, None]
        row = row.to(tl.int64)[:, None]
        tl.store(codes_ptr + row * D + d, codes, mask=there & (d < D))
        at = scale_ptr + row * stride_scale + place_in_stages(g, GROUP)
        tl.store(at, scale, mask=there)


def quantize_in_order(
    x_TD: Tensor, codes: Codes, inverse_R: Tensor | None = None, top_k: int = 1
) -> tuple[Tensor, Tensor]:
    """Codes of float8 [R, D] of the token in each row (`sort_pairs`), in the order of
    `in_float8_order`, and their float32 scales [R, places] of as many columns as share one of W, by
    `place_in_stages`. Rows of no pair stay unwritten. Without `inverse_R` of the rows of x
    themselves, which have that order."""
    T, D = x_TD.shape
    codes_RD = x_TD.new_empty(T * top_k, D, dtype=torch.float8_e4m3fn)
    scale_RP = places_for_scales(codes_RD)
    launch(
        quantize_in_order_kernel,
        (triton.cdiv(T, ROWS), triton.cdiv(D, float8_tile.COLUMNS) * 2),
        x_TD, inverse_R, codes_RD, scale_RP, x_TD.stride(0), scale_RP.stride(0), T,
        K=top_k, D=D, BT=ROWS, BD=COLUMNS, GROUP=codes.weight.across,
        BY_POWERS=codes.scaled == POWERS, num_warps=4, **pdl_options(x_TD),
    )  # fmt: skip
    return codes_RD, scale_RP


def places_for_scales(codes_RD: Tensor) -> Tensor:
    """Room for the scales of groups of columns of rows."""
    R, D = codes_RD.shape
    places = triton.cdiv(D, float8_tile.COLUMNS) * float8_tile.SCALES
    return codes_RD.new_empty(R, places, dtype=torch.float32)
