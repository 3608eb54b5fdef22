"""The backward of the activation, a few rows a program; `moe_ops/ops/activate_backward.py` has the
math.

R rows, I columns behind the activation; y has twice as many if it is gated. Pairs of token and
choice without a row get their 0 by a launch ahead of that of the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Act
from moe_ops.kernels.triton.activate import halves_of, tile_of
from moe_ops.kernels.triton.activation import activate, derivative, shifted
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

FILLED = 1024  # values of a program of `fill_kernel`


@on_its_device
def activate_backward(
    dh_RI: Tensor, y_RF: Tensor, weights_TK: Tensor, rows_R: Tensor, act: Act, for_weights: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The `activate_backward` op, of gradients and y whose rows are contiguous, and of contiguous
    weights and names of rows. `dtype`: of the gradients of weights, which are rounded to it."""
    R, I = dh_RI.shape
    dy_RF = y_RF.new_empty(y_RF.shape)
    wh_RI = y_RF.new_empty(R if for_weights else 0, I)
    dweights_TK = y_RF.new_empty(weights_TK.shape, dtype=dtype)
    if R == 0:
        return dy_RF, wh_RI, dweights_TK
    fill(dweights_TK, 0)
    BR, BI = tile_of(I, y_RF.element_size())
    launch(
        activate_backward_kernel, (triton.cdiv(R, BR),),
        dh_RI, y_RF, weights_TK, rows_R, dy_RF, wh_RI if for_weights else None, dweights_TK,
        dh_RI.stride(0), y_RF.stride(0), R,
        I=I, ACT=act, BR=BR, BI=BI, num_warps=4, **pdl_options(dh_RI),
    )  # fmt: skip
    return dy_RF, wh_RI, dweights_TK


def fill(out: Tensor, value: int) -> None:
    """Fill a contiguous tensor, by a launch that can be repeated."""
    launch(
        fill_kernel, (triton.cdiv(out.numel(), FILLED),), out, out.numel(),
        VALUE=value, BLOCK=FILLED, num_warps=4, **pdl_options(out),
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def fill_kernel(out_ptr, N, VALUE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    take_turn(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.full((BLOCK,), VALUE, out_ptr.dtype.element_ty), mask=at < N)


@triton.jit(do_not_specialize=["R"])
def activate_backward_kernel(
    dh_ptr, y_ptr, weights_ptr, rows_ptr, dy_ptr, wh_ptr, dweights_ptr, stride_dh, stride_y, R,
    I: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BR rows by one program, BI columns at a time; nothing of unused rows is read or written."""
    F: tl.constexpr = 2 * I if ACT.gated else I
    LIMIT: tl.constexpr = ACT.limit
    take_turn(PDL)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    pair = tl.load(rows_ptr + row, mask=row < R, other=-1)
    used = pair >= 0
    weight = tl.load(weights_ptr + pair, mask=used, other=0.0).to(tl.float32)[:, None]
    row = row.to(tl.int64)[:, None]
    dots = tl.zeros((BR, BI), tl.float32)  # of what `dh` and `h` have in a column of each step
    for first in range(0, I, BI):
        i = first + tl.arange(0, BI)[None, :]
        inside = used[:, None] & (i < I)
        dh = tl.load(dh_ptr + row * stride_dh + i, mask=inside, other=0.0).to(tl.float32)
        if ACT.gated:
            gate, up = halves_of(y_ptr + row * stride_y, first, used[:, None], I, BR, BI, ACT)
            f = activate(gate, ACT)
            factor = shifted(up, ACT)
            h = f * factor
            dgate = weight * dh * derivative(gate, ACT) * factor
            dup = weight * dh * f
            if LIMIT is not None:
                dup *= ((up >= -LIMIT) & (up <= LIMIT)).to(tl.float32)
            store_halves(dy_ptr + row * F, first, used[:, None], dgate, dup, I, BI, ACT)
        else:
            y = tl.load(y_ptr + row * stride_y + i, mask=inside, other=0.0).to(tl.float32)
            h = activate(y, ACT)
            dy = weight * dh * derivative(y, ACT)
            tl.store(dy_ptr + row * F + i, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        if wh_ptr is not None:
            wh = (weight * h).to(wh_ptr.dtype.element_ty)
            tl.store(wh_ptr + row * I + i, wh, mask=inside)
        dots += dh * h
    tl.store(dweights_ptr + pair, tl.sum(dots, 1).to(dweights_ptr.dtype.element_ty), mask=used)


@triton.jit
def store_halves(
    dy_ptrs, first, used, dgate, dup, I: tl.constexpr, BI: tl.constexpr, ACT: tl.constexpr
):
    """Store the gradients of what `halves_of` loads."""
    dgate = dgate.to(dy_ptrs.dtype.element_ty)
    dup = dup.to(dy_ptrs.dtype.element_ty)
    if ACT.interleaved:
        f = 2 * first + tl.arange(0, 2 * BI)[None, :]
        tl.store(dy_ptrs + f, tl.interleave(dgate, dup), mask=used & (f < 2 * I))
    else:
        i = first + tl.arange(0, BI)[None, :]
        inside = used & (i < I)
        tl.store(dy_ptrs + i, dgate, mask=inside)
        tl.store(dy_ptrs + I + i, dup, mask=inside)
