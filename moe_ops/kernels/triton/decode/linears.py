"""Several linear layers of one input with few rows, in one launch: every weight is read once.

    linears_one    of one row: products and sums, without the matrix units
    linears_few    of up to 64 rows: weights are the rows of the matrix units' tiles, the input's
                   rows their columns

The blocks of all weights are programs of the one launch, those of the first weight first. Weights
do not depend on the launch before, so each program of linears_one prefetches its first tile before
that launch ends. On Hopper few outputs of up to eight rows, as of a router, are computed by the
kernel of linears_gluon.py, which has all of its weights on their way by then, and norms the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import STEP
from moe_ops.kernels.triton.decode.blocks import MOST, bias_of, rows_of, write_all, write_columns
from moe_ops.kernels.triton.decode.linears_plan import LinearsPlan, plan_for
from moe_ops.kernels.triton.decode.norm import (
    Norm,
    gain_at,
    input_at,
    inverse_rms,
    norm_of,
    norm_rows,
)
from moe_ops.kernels.triton.experts.call import DTYPES
from moe_ops.kernels.triton.experts.products.register_stream import Stream
from moe_ops.kernels.triton.launch import (
    is_hopper,
    on_its_device,
    pdl_options,
    processors,
    shared_memory,
    take_turn,
)
from moe_ops.kernels.triton.replay import launch


@on_its_device
def run(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    plan: LinearsPlan | None = None,
    *,
    invariant: bool = False,
) -> list[Tensor]:
    """y_g = x W_gᵀ + b_g for weights [N_g, K] that no launch still in flight writes.

    Sums are in float32, rounded once to the dtype of the input; the same in every run. Of an
    invariant call they are those of `linears_few`, whatever the number of rows.
    """
    outs = [x_TK.new_empty(x_TK.shape[0], w.shape[0]) for w in weights]
    for first in range(0, len(weights), MOST):
        part = slice(first, first + MOST)
        _launch(x_TK, weights[part], biases[part], outs[part], plan, few=invariant)
    return outs


@on_its_device
def run_normed(
    x_TK: Tensor,
    residual_TK: Tensor | None,
    gain_K: Tensor,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gain_shift: float | None = None,
    plan: LinearsPlan | None = None,
    *,
    invariant: bool = False,
) -> list[Tensor]:
    """[s, n, y_0, ...]: s = x + residual, left out if there is no residual, n = gain s / rms(s), or
    that of a shifted gain, as `normed_linears` rounds it, and the rest `run` of n.

    One row, or a few for few outputs, are normed in the launch for the first weights, of which
    every program norms all of them for itself; others are in a launch before, and so are all of an
    invariant call.
    """
    norm, made = norm_of(x_TK, residual_TK, gain_K, eps, gain_shift)
    T = x_TK.shape[0]
    few = T > 1 and (plan is not None or outputs_stream(x_TK, weights[:MOST], True) is None)
    if invariant or few:
        norm_rows(x_TK, norm)
        return [*made, *run(norm.normed, weights, biases, plan, invariant=invariant)]
    outs = [x_TK.new_empty(T, w.shape[0]) for w in weights[:MOST]]
    _launch(x_TK, weights[:MOST], biases[:MOST], outs, plan, norm)
    return [*made, *outs, *run(norm.normed, weights[MOST:], biases[MOST:], plan)]


def _launch(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    plan: LinearsPlan | None,
    norm: Norm | None = None,
    few: bool = False,
) -> None:
    """`few`: by `linears_few`, whatever the number of rows."""
    T, K = x_TK.shape
    sizes = [w.shape[0] for w in weights]
    stream = None if plan or few else outputs_stream(x_TK, weights, norm is not None)
    if plan is None:
        rows = max(T, 2) if few else T
        plan = plan_for(rows, sum(sizes), K, processors(x_TK), shared_memory(x_TK))
    options = pdl_options(x_TK)
    rest = [None] * (MOST - len(weights))
    # Where the blocks of each weight begin among all of them, and where the last ones end.
    rows = plan.rows if stream is None else stream.rows
    blocks = [triton.cdiv(n, rows) for n in sizes]
    firsts = [sum(blocks[:g]) for g in range(MOST + 1)]
    # A weight that is not there has no blocks; its address is not looked at.
    tensors = (x_TK, *weights, *[weights[0] for _ in rest], *biases, *rest, *outs, *rest)
    constants = {
        **{f"N{g}": n for g, n in enumerate([*sizes, 0, 0, 0][:MOST])},
        **{f"F{g}": firsts[g] for g in range(1, MOST)},
        "K": K,
    }  # fmt: skip
    residual, gain, eps, total, normed, shift = norm or (None, None, 0.0, None, None, None)
    if stream is not None:
        from moe_ops.kernels.triton.decode import linears_gluon

        launch(
            linears_gluon.linears_few_outputs, (firsts[MOST],),
            *tensors, residual, gain, total, normed, T, x_TK.stride(0),
            0 if residual is None else residual.stride(0),
            EPS=eps, SHIFT=shift, SIZES=stream.sizes, **stream.options,
            **constants, **options,
        )  # fmt: skip
        return
    constants |= {"BN": plan.rows, "BK": plan.step, "num_warps": plan.warps}
    if T == 1 and not few:
        launch(
            linears_one, (firsts[MOST],), *tensors, residual, gain, total, normed,
            KP=triton.next_power_of_2(K), EPS=eps, SHIFT=shift, **constants, **options,
        )  # fmt: skip
    else:
        BT = max(16, triton.next_power_of_2(T))
        launch(
            linears_few,
            (firsts[MOST],),
            *tensors,
            T,
            x_TK.stride(0),
            **constants,
            BT=BT,
            num_stages=plan.stages,
            **options,
        )


def outputs_stream(x_TK: Tensor, weights: Sequence[Tensor], normed: bool) -> Stream | None:
    """The sizes of `linears_few_outputs` for up to eight rows, normed or not, and few outputs: a
    block of 16 warps that share columns, of which registers hold one or two steps of each. None for
    what that is not for."""
    T, K = x_TK.shape
    if not is_hopper(x_TK) or x_TK.dtype not in DTYPES or not 1 < T <= 8:
        return None
    outputs, most = sum(w.shape[0] for w in weights), 16 * processors(x_TK)
    steps = 1 if normed else 2
    if outputs > most or K > steps * 16 * STEP or K % 8 or x_TK.stride(0) % 8:
        return None
    if any(t.data_ptr() % 16 for t in (x_TK, *weights)):
        return None
    # At other strides x is loaded column by column. There ptxas spills to take half the registers.
    return Stream(S=16, C=16, registers=0 if x_TK.stride(0) % 16 == 0 else 128)


@triton.jit
def linears_one(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, b0_ptr, b1_ptr, b2_ptr, b3_ptr,
    y0_ptr, y1_ptr, y2_ptr, y3_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, EPS: tl.constexpr, SHIFT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of the one row. The next tile is on its way while one is summed."""
    g, w_ptr, n_N, size = rows_of(
        w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3, N0, N1, N2, N3, BN
    )  # fmt: skip
    # Rows behind the last are the last: what is not stored need not be masked.
    w_N1 = w_ptr + (tl.minimum(n_N, size - 1).to(tl.int64) * K)[:, None]
    k_K = tl.arange(0, BK)
    EVEN: tl.constexpr = K % BK == 0
    LAST: tl.constexpr = (K - 1) // BK * BK
    inside_K = LAST + k_K < K
    if EVEN or LAST > 0:
        w_NK = tl.load(w_N1 + k_K[None, :], eviction_policy="evict_first")
    else:
        w_NK = tl.load(w_N1 + k_K[None, :], mask=inside_K[None, :], other=0.0)
    gain_K = gain_at(gain_ptr, k_K, K)
    bias_N = bias_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, g, n_N, size)  # not last, to be waited for
    take_turn(PDL)
    inverse = 0.0
    if gain_ptr is not None:
        inverse = inverse_rms(
            x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, K, KP, EPS, SHIFT
        )  # fmt: skip
    acc_NK = tl.zeros((BN, BK), tl.float32)
    for start in range(BK, LAST + BK, BK):
        if EVEN:
            next_NK = tl.load(w_N1 + (start + k_K)[None, :], eviction_policy="evict_first")
        else:
            next_NK = tl.load(
                w_N1 + (start + k_K)[None, :], mask=(start + k_K < K)[None, :], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
        next_gain_K = gain_at(gain_ptr, start + k_K, K)
        before_K = start - BK + k_K
        x_K = input_at(x_ptr, residual_ptr, gain_ptr, gain_K, inverse, before_K, K, SHIFT)
        acc_NK += w_NK.to(tl.float32) * x_K[None, :]
        w_NK, gain_K = next_NK, next_gain_K
    x_K = input_at(x_ptr, residual_ptr, gain_ptr, gain_K, inverse, LAST + k_K, K, SHIFT)
    acc_NK += w_NK.to(tl.float32) * x_K[None, :]
    acc_N = tl.sum(acc_NK, 1)
    if bias_N is not None:
        acc_N += bias_N
    write_all(acc_N, n_N, g, size, y0_ptr, y1_ptr, y2_ptr, y3_ptr)


# One compiled kernel serves several numbers of rows.
@triton.jit(do_not_specialize=["T"])
def linears_few(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, b0_ptr, b1_ptr, b2_ptr, b3_ptr,
    y0_ptr, y1_ptr, y2_ptr, y3_ptr, T, stride_x,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of every row."""
    g, w_ptr, n_N, size = rows_of(
        w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3, N0, N1, N2, N3, BN
    )  # fmt: skip
    w_N1 = w_ptr + (tl.minimum(n_N, size - 1).to(tl.int64) * K)[:, None]
    take_turn(PDL)
    k_K = tl.arange(0, BK)
    t_T = tl.arange(0, BT)
    x_1T = (x_ptr + t_T * stride_x)[None, :]
    acc_NT = tl.zeros((BN, BT), tl.float32)
    for start in range(0, K, BK):
        inside_K = start + k_K < K
        if K % BK == 0:
            w_NK = tl.load(w_N1 + (start + k_K)[None, :], eviction_policy="evict_first")
        else:
            w_NK = tl.load(
                w_N1 + (start + k_K)[None, :], mask=inside_K[None, :], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
        x_KT = tl.load(
            x_1T + (start + k_K)[:, None], mask=inside_K[:, None] & (t_T < T)[None, :], other=0.0
        )
        acc_NT = tl.dot(w_NK, x_KT, acc_NT, input_precision="ieee")
    write_columns(acc_NT, n_N, tl.where(g == 0, size, 0), T, b0_ptr, y0_ptr, N0, BT)
    if y1_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 1, size, 0), T, b1_ptr, y1_ptr, N1, BT)
    if y2_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 2, size, 0), T, b2_ptr, y2_ptr, N2, BT)
    if y3_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 3, size, 0), T, b3_ptr, y3_ptr, N3, BT)
