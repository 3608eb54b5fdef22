"""The norm of a few rows, with the sum before it, in one launch.

    norm_rows    a row: x + residual, normed, and once more in the order in which codes are decoded

Of one row it is part of the launch that reads it: see linears.py. What reads several rows is
launched while this one runs, and has its weights on their way.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Weight
from moe_ops.kernels.triton.experts.formats.order import arranged, place_of
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch


class Norm(NamedTuple):
    """What is made of an input before it is multiplied, and where that is written."""

    residual: Tensor | None
    gain: Tensor
    eps: float
    sum: Tensor | None
    normed: Tensor
    gain_shift: float | None


def norm_of(
    x_TK: Tensor, residual_TK: Tensor | None, gain_K: Tensor, eps: float, gain_shift: float | None
) -> tuple[Norm, list[Tensor]]:
    """A norm with room for what it writes, and that: the sum, if there is one, and the normed
    rows."""
    total = None if residual_TK is None else x_TK.new_empty(x_TK.shape)
    normed = x_TK.new_empty(x_TK.shape)
    norm = Norm(residual_TK, gain_K, eps, total, normed, gain_shift)
    return norm, [normed] if total is None else [total, normed]


@on_its_device
def norm_rows(x_TK: Tensor, norm: Norm, weight: Weight | None = None) -> Tensor | None:
    """Write s = x + residual and n, s normed, where a norm has room for them. Returns n once more,
    as `arrange` gives it for codes of a format that come in words, if there is one."""
    (T, K), out = x_TK.shape, None
    if weight is not None:
        out = x_TK.new_empty(T, arranged(K, weight))
    residual = norm.residual
    launch(
        norm_rows_kernel, (T,),
        x_TK, residual, norm.gain, norm.sum, norm.normed, out,
        x_TK.stride(0), 0 if residual is None else residual.stride(0),
        K=K, KP=max(128, triton.next_power_of_2(K)), OUT=0 if out is None else out.shape[1],
        BITS=0 if weight is None else weight.bits, EPS=norm.eps, SHIFT=norm.gain_shift,
        num_warps=8 if K > 2048 else 4, **pdl_options(x_TK),
    )  # fmt: skip
    return out


@triton.jit
def sum_at(x_ptr, residual_ptr, k_K, inside_K):
    """The input, with what is added to it, rounded to its dtype, in float32."""
    x_K = tl.load(x_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x_K += tl.load(residual_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
        x_K = x_K.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x_K


@triton.jit
def scaled(s_K, inverse, gain_ptr, k_K, inside_K, SHIFT: tl.constexpr):
    """s / rms(s), rounded to the dtype of the gain, times the gain, rounded again, in float32; of a
    shifted gain, if there is a shift, rounded once."""
    gain_K = tl.load(gain_ptr + k_K, mask=inside_K, other=0.0)
    return normed_of(s_K, inverse, gain_K, SHIFT)


@triton.jit
def normed_of(s_K, inverse, gain_K, SHIFT: tl.constexpr):
    """What `scaled` says, of a gain that was read before."""
    dtype: tl.constexpr = gain_K.dtype
    gain_K = gain_K.to(tl.float32)
    if SHIFT is None:
        n_K = (s_K * inverse).to(dtype).to(tl.float32) * gain_K
    else:
        n_K = s_K * inverse * (gain_K + SHIFT)
    return n_K.to(dtype).to(tl.float32)


@triton.jit
def gain_at(gain_ptr, k_K, K: tl.constexpr):
    """The gain of the norm at some columns, if there is one."""
    gain_K = 0.0
    if gain_ptr is not None:
        gain_K = tl.load(gain_ptr + k_K, mask=k_K < K, other=0.0)
    return gain_K


@triton.jit
def input_at(
    x_ptr, residual_ptr, gain_ptr, gain_K, inverse, k_K, K: tl.constexpr, SHIFT: tl.constexpr
):
    """The row that the weights are multiplied with, at some columns."""
    x_K = sum_at(x_ptr, residual_ptr, k_K, k_K < K)
    if gain_ptr is not None:
        x_K = normed_of(x_K, inverse, gain_K, SHIFT)
    return x_K


@triton.jit
def inverse_rms(
    x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr,
    K: tl.constexpr, KP: tl.constexpr, EPS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """1 / sqrt(mean(s²) + eps) of the whole row, which the first program also writes."""
    k_K = tl.arange(0, KP)
    inside_K = k_K < K
    s_K = sum_at(x_ptr, residual_ptr, k_K, inside_K)
    inverse = tl.rsqrt(tl.sum(s_K * s_K, 0) / K + EPS)
    mine_K = k_K < tl.where(tl.program_id(0) == 0, K, 0)
    n_K = scaled(s_K, inverse, gain_ptr, k_K, mine_K, SHIFT)
    tl.store(normed_ptr + k_K, n_K.to(normed_ptr.dtype.element_ty), mask=mine_K)
    if sum_ptr is not None:
        tl.store(sum_ptr + k_K, s_K.to(sum_ptr.dtype.element_ty), mask=mine_K)
    return inverse


@triton.jit
def norm_rows_kernel(
    x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, arranged_ptr, stride_x, stride_r,
    K: tl.constexpr, KP: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, EPS: tl.constexpr,
    SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a row."""
    t = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, KP)
    inside_K = k_K < K
    gain_K = tl.load(gain_ptr + k_K, mask=inside_K, other=0.0)
    take_turn(PDL)
    x_ptr += t * stride_x
    if residual_ptr is not None:
        residual_ptr += t * stride_r
    s_K = sum_at(x_ptr, residual_ptr, k_K, inside_K)
    inverse = tl.rsqrt(tl.sum(s_K * s_K, 0) / K + EPS)
    n_K = normed_of(s_K, inverse, gain_K, SHIFT).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + t * K + k_K, n_K, mask=inside_K)
    if sum_ptr is not None:
        tl.store(sum_ptr + t * K + k_K, s_K.to(sum_ptr.dtype.element_ty), mask=inside_K)
    if arranged_ptr is not None:  # columns behind the last are zeros
        tl.store(arranged_ptr + t * OUT + place_of(k_K, BITS), n_K, mask=k_K < OUT)
