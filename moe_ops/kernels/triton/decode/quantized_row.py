"""Linear layers of one row whose weights are codes, in one launch for four weights: without the
matrix units, which have nothing to share between rows, and with the norm of the row where it has
one.

    quantized_row    a program: some rows of a weight, decoded and multiplied in float32

Codes and scales do not depend on the launch before, so each program asks for its first tile before
that launch ends. The input stays as it is: each program decodes to the order of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Weight, brings_decoder
from moe_ops.kernels.triton.decode.blocks import MOST, bias_of, one_of, rows_of, write_all
from moe_ops.kernels.triton.decode.coded import Coded
from moe_ops.kernels.triton.decode.norm import Norm, gain_at, input_at, inverse_rms
from moe_ops.kernels.triton.decode.quantized_linears_plan import QuantizedRowPlan, row_plan_for
from moe_ops.kernels.triton.experts.formats.four_bits import decoded, less_zero
from moe_ops.kernels.triton.experts.formats.halves import half_of
from moe_ops.kernels.triton.experts.formats.scales import finite, group_row, rescaled, scale_of
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, processors, take_turn
from moe_ops.kernels.triton.replay import launch


def multiplies_row(weight: Weight) -> bool:
    """Whether `run_row` decodes codes of a format: those of 4 or 8 bits that no other package
    decodes."""
    return weight.bits in (4, 8) and not brings_decoder(weight)


@on_its_device
def run_row(x_TK: Tensor, layers: Coded, plan: QuantizedRowPlan | None = None) -> list[Tensor]:
    """y_g = x W_gᵀ + b_g of one row, bfloat16 or float16, for codes of 4 or 8 bits that no launch
    still in flight writes.

    Codes, scales and sums are multiplied in float32, and rounded once; the same in every run.
    """
    return layers.results(x_TK, lambda part, outs: _launch(x_TK, part, outs, plan))


@on_its_device
def run_normed_row(
    x_TK: Tensor, norm: Norm, layers: Coded, plan: QuantizedRowPlan | None = None
) -> list[Tensor]:
    """`run_row` of x normed, which the launch of the first weights norms."""
    outs = [x_TK.new_empty(1, n) for n in layers.sizes[:MOST]]
    _launch(x_TK, layers.part(slice(MOST)), outs, plan, norm)
    return [*outs, *run_row(norm.normed, layers.part(slice(MOST, None)), plan)]


def _launch(
    x_TK: Tensor,
    layers: Coded,
    outs: Sequence[Tensor],
    plan: QuantizedRowPlan | None,
    norm: Norm | None = None,
) -> None:
    K, weight = x_TK.shape[1], layers.weight
    if plan is None:
        plan = row_plan_for(sum(layers.sizes), K, processors(x_TK))
    programs, constants = layers.constants(plan.rows)
    residual, gain, eps, total, normed, shift = norm or (None, None, 0.0, None, None, None)
    launch(
        quantized_row, (programs,),
        x_TK, *layers.arguments(outs), residual, gain, total, normed,
        K=K, KP=triton.next_power_of_2(K), ROW=layers.row, W=weight, EPS=eps, SHIFT=shift,
        BN=plan.rows, BK=plan.step, EACH=plan.together(weight), num_warps=plan.warps,
        **constants, **pdl_options(x_TK),
    )  # fmt: skip


@triton.jit
def codes_at(w_N1, start, K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr):
    """Codes of a step of columns, as they are stored: words of eight, or bytes."""
    PER: tl.constexpr = 8 if W.bits == 4 else 1
    piece_P = start // PER + tl.arange(0, BK // PER)
    if K % BK == 0:
        w_NP = tl.load(w_N1 + piece_P[None, :], eviction_policy="evict_first")
    else:
        inside_P = piece_P < K // PER
        w_NP = tl.load(
            w_N1 + piece_P[None, :], mask=inside_P[None, :], other=0.0 if PER == 1 else 0,
            eviction_policy="evict_first",
        )  # fmt: skip
    return w_NP


@triton.jit
def factors_at(
    ptr, group_N, start, K: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr, W: tl.constexpr
):
    """Scales or zero points, as they are stored, of each EACH columns of a step."""
    ACROSS: tl.constexpr = W.across
    column_C = start + tl.arange(0, BK // EACH) * EACH
    at_NC = group_N[:, None] + (column_C // ACROSS)[None, :]
    if K % BK == 0:
        found_NC = tl.load(ptr + at_NC)
    else:
        found_NC = tl.load(ptr + at_NC, mask=(column_C < K)[None, :], other=0)
    return found_NC


@triton.jit
def first_factors(
    ptr, group_N, K: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr, W: tl.constexpr
):
    """Scales or zero points of the first step: [N, 1] where a row has one for all columns."""
    if W.across == -1:
        found_NC = tl.load(ptr + group_N)[:, None]
    else:
        found_NC = factors_at(ptr, group_N, 0, K, BK, EACH, W)
    return found_NC


@triton.jit
def floats_of(w_NP, W: tl.constexpr, DTYPE: tl.constexpr):
    """[N, columns] in float32, in their order: what codes stand for before scales, zero points
    (but for int4, which has one of 8) and `rescaled`."""
    if W.bits == 4:
        FLOAT: tl.constexpr = W.element == "float4_e2m1"
        SCALED: tl.constexpr = FLOAT and DTYPE == tl.bfloat16
        less = less_zero(0 * w_NP, W.element == "uint4", DTYPE)
        pair = 0x5F805F80  # 2**64 of bfloat16
        p0 = decoded(w_NP, 0, less, pair, FLOAT, SCALED, DTYPE)
        p1 = decoded(w_NP, 1, less, pair, FLOAT, SCALED, DTYPE)
        p2 = decoded(w_NP, 2, less, pair, FLOAT, SCALED, DTYPE)
        p3 = decoded(w_NP, 3, less, pair, FLOAT, SCALED, DTYPE)
        low = joined_4(p0, p1, p2, p3, False, DTYPE)
        high = joined_4(p0, p1, p2, p3, True, DTYPE)
        N: tl.constexpr = w_NP.shape[0]
        P: tl.constexpr = w_NP.shape[1]
        values = tl.permute(tl.join(low, high), (0, 1, 3, 2))
        value_NK = tl.reshape(values, (N, P * 8))
    else:
        value_NK = w_NP.to(tl.float32)
    return value_NK


@triton.jit
def joined_4(p0, p1, p2, p3, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """[N, P, 4] in float32: one of the two halves of four words."""
    f0 = half_of(p0, HIGH, DTYPE).to(tl.float32)
    f1 = half_of(p1, HIGH, DTYPE).to(tl.float32)
    f2 = half_of(p2, HIGH, DTYPE).to(tl.float32)
    f3 = half_of(p3, HIGH, DTYPE).to(tl.float32)
    pairs = tl.join(tl.join(f0, f2), tl.join(f1, f3))
    return tl.reshape(pairs, (p0.shape[0], p0.shape[1], 4))


@triton.jit
def sums_of(
    w_NP, scale_NC, zero_NC, x_K, HAS_ZERO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EACH: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[N, C] in float32: products of a step's codes with the row, summed over each EACH columns."""
    ACROSS: tl.constexpr = W.across
    KIND: tl.constexpr = W.kind
    value_NK = floats_of(w_NP, W, DTYPE)
    if HAS_ZERO:
        value_NCE = tl.reshape(value_NK, (BN, BK // EACH, EACH))
        value_NCE -= zero_NC.to(tl.float32)[:, :, None]
        value_NK = tl.reshape(value_NCE, (BN, BK))
    sum_NC = tl.sum(tl.reshape(value_NK * x_K[None, :], (BN, BK // EACH, EACH)), 2)
    if ACROSS != -1:
        sum_NC *= finite(scale_of(scale_NC, KIND))
    return sum_NC


@triton.jit
def quantized_row(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, s0_ptr, s1_ptr, s2_ptr, s3_ptr,
    z0_ptr, z1_ptr, z2_ptr, z3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr,
    residual_ptr, gain_ptr, sum_ptr, normed_ptr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    ROW: tl.constexpr, W: tl.constexpr, EPS: tl.constexpr, SHIFT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of the one row. The next tile is on its way while one is summed. A
    row of a weight is ROW words or bytes."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    ACROSS: tl.constexpr = W.across
    KIND: tl.constexpr = W.kind
    HAS_ZERO: tl.constexpr = z0_ptr is not None
    g, w_ptr, n_N, size = rows_of(
        w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3, N0, N1, N2, N3, BN
    )  # fmt: skip
    scale_ptr = one_of(s0_ptr, s1_ptr, s2_ptr, s3_ptr, F1, F2, F3)
    # Rows behind the last are the last: what is not stored need not be masked.
    row_N = tl.minimum(n_N, size - 1)
    w_N1 = w_ptr + (row_N.to(tl.int64) * ROW)[:, None]
    w_NP = codes_at(w_N1, 0, K, BK, W)
    group_N = group_row(0 * g, row_N, N0, K, W)
    scale_NC = first_factors(scale_ptr, group_N, K, BK, EACH, W)
    zero_ptr, zero_NC = scale_ptr, scale_NC
    if HAS_ZERO:
        zero_ptr = one_of(z0_ptr, z1_ptr, z2_ptr, z3_ptr, F1, F2, F3)
        zero_NC = first_factors(zero_ptr, group_N, K, BK, EACH, W)
    k_K = tl.arange(0, BK)
    gain_K = gain_at(gain_ptr, k_K, K)
    factor_N = 1.0
    if g0_ptr is not None:
        factor_N = tl.load(one_of(g0_ptr, g1_ptr, g2_ptr, g3_ptr, F1, F2, F3))
    if ACROSS == -1:
        factor_N *= finite(scale_of(tl.load(scale_ptr + group_N), KIND))
    bias_N = bias_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, g, n_N, size)
    take_turn(PDL)
    inverse = 0.0
    if gain_ptr is not None:
        inverse = inverse_rms(
            x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, K, KP, EPS, SHIFT
        )  # fmt: skip
    LAST: tl.constexpr = (K - 1) // BK * BK
    acc_NC = tl.zeros((BN, BK // EACH), tl.float32)
    for start in range(BK, LAST + BK, BK):
        next_NP = codes_at(w_N1, start, K, BK, W)
        next_scale_NC, next_zero_NC = scale_NC, zero_NC
        if ACROSS != -1:
            next_scale_NC = factors_at(scale_ptr, group_N, start, K, BK, EACH, W)
            if HAS_ZERO:
                next_zero_NC = factors_at(zero_ptr, group_N, start, K, BK, EACH, W)
        next_gain_K = gain_at(gain_ptr, start + k_K, K)
        before_K = start - BK + k_K
        x_K = input_at(x_ptr, residual_ptr, gain_ptr, gain_K, inverse, before_K, K, SHIFT)
        acc_NC += sums_of(w_NP, scale_NC, zero_NC, x_K, HAS_ZERO, BN, BK, EACH, W, DTYPE)
        w_NP, scale_NC, zero_NC, gain_K = next_NP, next_scale_NC, next_zero_NC, next_gain_K
    x_K = input_at(x_ptr, residual_ptr, gain_ptr, gain_K, inverse, LAST + k_K, K, SHIFT)
    acc_NC += sums_of(w_NP, scale_NC, zero_NC, x_K, HAS_ZERO, BN, BK, EACH, W, DTYPE)
    acc_N = rescaled(tl.sum(acc_NC, 1), W, DTYPE)
    if ACROSS == -1 or g0_ptr is not None:
        acc_N *= factor_N
    if bias_N is not None:
        acc_N += bias_N
    write_all(acc_N, n_N, g, size, y0_ptr, y1_ptr, y2_ptr, y3_ptr)
