"""The activation of rows that were stored as a product made them, a few rows a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Act
from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

TILE = 4096  # bytes of h that a program makes at once
COLUMNS = 256  # the most values of a row among them


def tile_of(columns: int, element_size: int) -> tuple[int, int]:
    """How many rows, and how many columns of h, a program takes at once."""
    BI = min(COLUMNS, triton.next_power_of_2(max(columns, 1)))
    return TILE // (BI * element_size), BI


def activate_rows(y_RF: Tensor, rows_R: Tensor, act: Act) -> Tensor:
    """h of contiguous rows y, in its dtype. Unused rows, whose name is -1, are not read, and stay
    unwritten."""
    R, F = y_RF.shape
    I = F // 2 if act.gated else F
    h_RI = y_RF.new_empty(R, I)
    if R == 0:
        return h_RI
    BR, BI = tile_of(I, y_RF.element_size())
    launch(
        activate_rows_kernel, (triton.cdiv(R, BR), triton.cdiv(I, BI)), y_RF, rows_R, h_RI, R,
        I=I, ACT=act, BR=BR, BI=BI, num_warps=4, **pdl_options(y_RF),
    )  # fmt: skip
    return h_RI


@triton.jit(do_not_specialize=["R"])
def activate_rows_kernel(
    y_ptr, rows_ptr, h_ptr, R,
    I: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BI columns of BR rows by one program."""
    F: tl.constexpr = 2 * I if ACT.gated else I
    take_turn(PDL)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    used = (tl.load(rows_ptr + row, mask=row < R, other=-1) >= 0)[:, None]
    row = row.to(tl.int64)[:, None]
    first = tl.program_id(1) * BI
    i = first + tl.arange(0, BI)[None, :]
    inside = used & (i < I)
    if ACT.gated:
        gate, up = halves_of(y_ptr + row * F, first, used, I, BR, BI, ACT)
        h = activate_gated(gate, up, ACT)
    else:
        h = activate(tl.load(y_ptr + row * F + i, mask=inside, other=0.0).to(tl.float32), ACT)
    tl.store(h_ptr + row * I + i, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def halves_of(
    y_ptrs, first, used, I: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr, ACT: tl.constexpr
):
    """Gate and up of the rows at y_ptrs, for BI columns of h from `first` on, in float32."""
    if ACT.interleaved:
        f = 2 * first + tl.arange(0, 2 * BI)[None, :]
        both = tl.load(y_ptrs + f, mask=used & (f < 2 * I), other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BR, BI, 2)))
    else:
        i = first + tl.arange(0, BI)[None, :]
        inside = used & (i < I)
        gate = tl.load(y_ptrs + i, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(y_ptrs + I + i, mask=inside, other=0.0).to(tl.float32)
    return gate, up
