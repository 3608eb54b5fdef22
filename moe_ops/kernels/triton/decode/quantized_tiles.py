"""Linear layers whose weights are codes in tiles of many rows, on Hopper:
`quantized_tiles_gluon.py` launched.

Few rows of weights are few programs, which then share the columns: each has sums of a part of them,
which a second launch adds in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.decode.blocks import one_of, rows_of
from moe_ops.kernels.triton.decode.coded import Coded, filled
from moe_ops.kernels.triton.decode.quantized_linears_plan import TiledPlan, tiled_plan_for
from moe_ops.kernels.triton.experts.products.grouped_tile import ROWS
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, processors, take_turn
from moe_ops.kernels.triton.replay import launch

SUMMED_ROWS, SUMMED_COLUMNS = 4, 256  # of a program that adds parts


@on_its_device
def run_tiles(x_TC: Tensor, K: int, layers: Coded, plan: TiledPlan | None = None) -> list[Tensor]:
    """y_g = x W_gᵀ + b_g of any number of rows, for codes of K columns.

    x: bfloat16 or float16, in the order in which codes are decoded (`arrange`). Values of codes are
    multiplied in its dtype; sums are in float32, rounded once; the same in every run. Biases are
    there for all layers, or for none.
    """
    return layers.results(x_TC, lambda part, outs: _launch(x_TC, K, part, outs, plan))


def _launch(
    x_TC: Tensor, K: int, layers: Coded, outs: Sequence[Tensor], plan: TiledPlan | None
) -> None:
    T = x_TC.shape[0]
    if plan is None:
        plan = tiled_plan_for(T, K, tuple(layers.sizes), layers.weight, processors(x_TC))
    if plan.parts == 1:
        _multiply(x_TC, K, layers, outs, plan)
        return
    made = [x_TC.new_empty(plan.parts, *y.shape, dtype=torch.float32) for y in outs]
    none = [None] * len(outs)
    _multiply(x_TC, K, layers._replace(global_scales=none, biases=none), made, plan)
    programs, constants = layers.constants(SUMMED_COLUMNS)
    launch(
        sum_parts, (programs, triton.cdiv(T, SUMMED_ROWS)),
        *filled(made, layers.global_scales, layers.biases, outs), T,
        PARTS=plan.parts, BN=SUMMED_COLUMNS, BT=SUMMED_ROWS, num_warps=4, **constants,
        **pdl_options(x_TC),
    )  # fmt: skip


def _multiply(x_TC: Tensor, K: int, layers: Coded, outs: Sequence[Tensor], plan: TiledPlan) -> None:
    from moe_ops.kernels.triton.decode import quantized_tiles_gluon as kernels

    T, tile = x_TC.shape[0], plan.tile
    programs, constants = layers.constants(ROWS)
    launch(
        kernels.quantized_linears_tiles, (programs, triton.cdiv(T, tile.tokens), plan.parts),
        *kernels.boxes_of(x_TC, layers.weights, layers.weight, tile.tokens),
        *filled(layers.factors, layers.zeros, layers.global_scales, layers.biases, outs), T,
        K=K, W=layers.weight, TILE=tile, PARTS=plan.parts, num_warps=4,
        maxnreg=kernels.REGISTERS[tile.blocks], **constants, **pdl_options(x_TC),
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def sum_parts(
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, T,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of BT rows, of which there are PARTS."""
    _, p_ptr, n_N, size = rows_of(p0_ptr, p1_ptr, p2_ptr, p3_ptr, F1, F2, F3, N0, N1, N2, N3, BN)
    t_T = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    inside_TN = (t_T < T)[:, None] & (n_N < size)[None, :]
    at_TN = t_T[:, None] * size + n_N[None, :]
    take_turn(PDL)
    total_TN = tl.zeros((BT, BN), tl.float32)
    for part in tl.static_range(PARTS):
        first = tl.cast(part * T, tl.int64) * size
        total_TN += tl.load(p_ptr + first + at_TN, mask=inside_TN, other=0.0)
    if g0_ptr is not None:
        total_TN *= tl.load(one_of(g0_ptr, g1_ptr, g2_ptr, g3_ptr, F1, F2, F3))
    if b0_ptr is not None:
        bias_ptr = one_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, F1, F2, F3)
        total_TN += tl.load(bias_ptr + n_N, mask=n_N < size, other=0.0).to(tl.float32)[None, :]
    y_ptr = one_of(y0_ptr, y1_ptr, y2_ptr, y3_ptr, F1, F2, F3)
    tl.store(y_ptr + at_TN, total_TN.to(y_ptr.dtype.element_ty), mask=inside_TN)
