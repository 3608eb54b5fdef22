"""Tokens whose columns are stored in the order of `order.py`.

Words of codes of four or six bits are multiplied a pair of codes at a time, so what they meet is
stored pair by pair: 16 bytes are read at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Weight
from moe_ops.kernels.triton.experts.formats.order import arranged, column_at
from moe_ops.kernels.triton.experts.schedule.sort import row_of
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch


@triton.jit
def arrange_block(
    x_ptr, out_ptr, stride_x, t, block,
    D: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A block of BD places of token t."""
    t = t.to(tl.int64)
    place = block * BD + tl.arange(0, BD)
    column = column_at(place, BITS)  # reads scatter within a token, which stays in the L1 cache
    x = tl.load(x_ptr + t * stride_x + column, mask=column < D, other=0.0)
    tl.store(out_ptr + t * OUT + place, x, mask=place < OUT)


@triton.jit(do_not_specialize=["M"])
def arrange_kernel(
    x_ptr, inverse_ptr, out_ptr, stride_x, M,
    K: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BD places of a token, in its row or in each of its K rows."""
    take_turn(PDL)
    if inverse_ptr is None:
        t, block = tl.program_id(0), tl.program_id(1)
        arrange_block(x_ptr, out_ptr, stride_x, t, block, D, OUT, BITS, BD)
    else:
        t = tl.program_id(0).to(tl.int64)
        place = tl.program_id(1) * BD + tl.arange(0, BD)
        column = column_at(place, BITS)
        columns = D
        if M is not None:  # a slot is read if it is used
            columns = tl.where(row_of(inverse_ptr, t, True, M) >= 0, D, 0)
        x = tl.load(x_ptr + t * stride_x + column, mask=column < columns, other=0.0)
        for k in range(K):
            row = row_of(inverse_ptr, t * K + k, True, M).to(tl.int64)
            tl.store(out_ptr + row * OUT + place, x, mask=place < tl.where(row >= 0, OUT, 0))


def places_at_once(places: int) -> int:
    """How many places of a token a program fills."""
    return min(1024, triton.next_power_of_2(places))


def arrange(
    x_TD: Tensor, weight: Weight, inverse_R: Tensor | None = None, top_k: int = 1,
    slots: int | None = None,
) -> Tensor:  # fmt: skip
    """Tokens whose columns are in the order in which weights are multiplied; with the rows of their
    pairs (`sort_pairs`) one in each row. Rows of no pair stay unwritten. inverse_R and slots as
    `row_of` takes them."""
    T, D = x_TD.shape
    out = x_TD.new_empty(T * top_k, arranged(D, weight))
    BD = places_at_once(out.shape[1])
    launch(
        arrange_kernel, (T, triton.cdiv(D, BD)), x_TD, inverse_R, out, x_TD.stride(0), slots,
        K=top_k, D=D, OUT=out.shape[1], BITS=weight.bits, BD=BD, num_warps=4, **pdl_options(x_TD),
    )  # fmt: skip
    return out
