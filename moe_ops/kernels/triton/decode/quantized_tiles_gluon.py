"""Linear layers whose weights are codes in tiles of many rows, in Gluon for Hopper (sm_90).

    quantized_linears_tiles    y_g = x W_gᵀ + b_g: a program has 128 rows of a weight, a tile of the
                               input's rows and a part of the columns

Codes are decoded where the matrix unit reads its first operand from: the producer, the consumers
and the order in which they sum are those of `grouped_registers.py`, of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.kernels.triton import LINEAR, Weight
from moe_ops.kernels.triton.decode import blocks
from moe_ops.kernels.triton.decode.blocks import one_of, place_of_block
from moe_ops.kernels.triton.experts.products import fragments, skeleton
from moe_ops.kernels.triton.experts.products.grouped_registers import (
    BOX,
    box_of,
    boxed,
    boxes_of_tile,
    copy,
    product,
)
from moe_ops.kernels.triton.launch import take_turn

ACT = gl.constexpr(LINEAR)
MOST = gl.constexpr(blocks.MOST)
REGISTERS = skeleton.REGISTERS


@gluon.jit
def _produce(g, x_desc, weights, tile, begin, steps, rings, sizes, HOW: gl.constexpr):
    """Copy the steps of a program from the codes of its weight."""
    at = boxes_of_tile(0, tile, None, rings, sizes, HOW)
    for i in gl.static_range(MOST):
        last = gl.where(g == i, begin + steps, begin)
        source = (x_desc, weights[i], weights[i])
        skeleton.copy_steps(begin, last, 0 * g, tile, at, source, rings, sizes, copy, HOW)


@gluon.jit
def _consume(
    LOWER: gl.constexpr, tile, begin, steps, output, rings, sizes, scales, HOW: gl.constexpr
):
    """Multiply and store half of a program's rows of a weight."""
    product(LOWER, 0 * begin, steps, tile, (), output, None, rings, sizes, scales, HOW, begin)


@gluon.jit(do_not_specialize=["T"])
def quantized_linears_tiles(
    x_desc, w0_desc, w1_desc, w2_desc, w3_desc, s0_ptr, s1_ptr, s2_ptr, s3_ptr,
    z0_ptr, z1_ptr, z2_ptr, z3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, T,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, N3: gl.constexpr,
    F1: gl.constexpr, F2: gl.constexpr, F3: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    TILE: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program; of PARTS of the columns, unless there is one, each has results [T, N] of its
    own in float32. Then there are no biases and no global scales."""
    TOKENS: gl.constexpr = TILE.tokens
    STAGES: gl.constexpr = TILE.stages
    HALVES: gl.constexpr = fragments.halves_of(W)
    g, block, size = place_of_block(F1, F2, F3, N0, N1, N2, N3)
    row = gl.program_id(1) * TOKENS
    part = gl.program_id(2)
    COLUMNS: gl.constexpr = fragments.columns_of(W)
    steps = (K + COLUMNS - 1) // COLUMNS // PARTS
    tile = (0 * block, T, row, block)
    y_ptr = one_of(y0_ptr, y1_ptr, y2_ptr, y3_ptr, F1, F2, F3)
    y_ptr += part.to(gl.int64) * T * size
    tokens = gl.allocate_shared_memory(x_desc.dtype, [HALVES * STAGES, TOKENS, BOX], x_desc.layout)
    codes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 4, 16, 16], w0_desc.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    take_turn(PDL)
    rings = (codes, tokens, full, empty)
    sizes = (size, K, size, size)
    output = (
        g0_ptr if g0_ptr is None else one_of(g0_ptr, g1_ptr, g2_ptr, g3_ptr, F1, F2, F3), None,
        b0_ptr if b0_ptr is None else one_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, F1, F2, F3), y_ptr,
    )  # fmt: skip
    scales = (
        one_of(s0_ptr, s1_ptr, s2_ptr, s3_ptr, F1, F2, F3),
        z0_ptr if z0_ptr is None else one_of(z0_ptr, z1_ptr, z2_ptr, z3_ptr, F1, F2, F3),
    )
    weights = (w0_desc, w1_desc, w2_desc, w3_desc)
    HOW: gl.constexpr = (W, TILE, ACT)
    begin = part * steps
    gl.warp_specialize(
        [
            (_consume, (0, tile, begin, steps, output, rings, sizes, scales, HOW)),
            (_consume, (1, tile, begin, steps, output, rings, sizes, scales, HOW)),
            (_produce, (g, x_desc, weights, tile, begin, steps, rings, sizes, HOW)),
        ],
        [4, 1],
        [104, 32] if TILE.blocks == 2 else [232, 40],
    )


def boxes_of(
    x_TC: Tensor, weights: Sequence[Tensor], weight: Weight, tokens: int
) -> list[TensorDescriptor]:
    """What boxes of the input and of each of MOST weights are copied by; the first one's stand in
    for those that are not there."""
    group = fragments.group_of(weight)
    found = [boxed(w.view(torch.int32)[None], False, group)[0] for w in weights]
    x_desc = skeleton.boxes(x_TC, box_of(tokens), BOX.value)
    return [x_desc, *found, *found[:1] * (blocks.MOST - len(found))]
