"""Several linear layers of one input with few rows, whose weights are codes, in one launch: every
code is read once, and decoded in registers by the decoders of experts.

The blocks of all weights are programs of the one launch, those of the first weight first. Weights
are the rows of the matrix units' tiles, the input's rows their columns. For codes of four and six
bits the input is put in the order in which these are decoded first, in a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Weight, in_words
from moe_ops.kernels.triton.decode.linears import MOST, rows_of, write_columns
from moe_ops.kernels.triton.decode.quantized_linears_plan import QuantizedLinearsPlan, plan_for
from moe_ops.kernels.triton.experts.formats.codes import as_stored, scales_as_stored
from moe_ops.kernels.triton.experts.formats.scales import rescaled, under_global
from moe_ops.kernels.triton.experts.operands.permuted import arrange
from moe_ops.kernels.triton.experts.products.block_steps import add_product
from moe_ops.kernels.triton.launch import (
    on_its_device,
    pdl_options,
    processors,
    shared_memory,
    take_turn,
)
from moe_ops.kernels.triton.replay import launch

Some = Sequence[Tensor | None]


@on_its_device
def run(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Some,
    global_scales: Some,
    biases: Some,
    weight: Weight,
    plan: QuantizedLinearsPlan | None = None,
) -> list[Tensor]:
    """y_g = x W_gᵀ + b_g for codes [N_g, K packed] of one format.

    x: bfloat16 or float16 of up to 64 rows, in which values of codes are multiplied; sums are in
    float32, rounded once; the same in every run. Zero points and global scales are there for all
    weights, or for none.
    """
    outs = [x_TK.new_empty(x_TK.shape[0], w.shape[0]) for w in weights]
    K = x_TK.shape[1]
    x_TK = arrange(x_TK, weight) if in_words(weight) else x_TK
    for first in range(0, len(weights), MOST):
        part = slice(first, first + MOST)
        some = (weights[part], scales[part], zeros[part], global_scales[part], biases[part])
        _launch(x_TK, K, *some, outs[part], weight, plan)
    return outs


def _launch(
    x_TK: Tensor,
    K: int,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Some,
    global_scales: Some,
    biases: Some,
    outs: Sequence[Tensor],
    weight: Weight,
    plan: QuantizedLinearsPlan | None,
) -> None:
    T, sizes = x_TK.shape[0], [w.shape[0] for w in weights]
    if plan is None:
        plan = plan_for(T, sum(sizes), weight.bits, processors(x_TK), shared_memory(x_TK))
    rest = MOST - len(weights)
    blocks = [triton.cdiv(n, plan.rows) for n in sizes]
    firsts = [sum(blocks[:g]) for g in range(MOST + 1)]
    stored = [as_stored(w, weight) for w in weights]
    factors = [scales_as_stored(s, weight) for s in scales]
    # A weight that is not there has no blocks; its addresses are not looked at.
    filled = [[*given, *[given[0]] * rest] for given in (stored, factors, zeros, global_scales)]
    launch(
        quantized_linears_few, (firsts[MOST],),
        x_TK, *(t for given in filled for t in given), *biases, *[None] * rest,
        *outs, *[None] * rest, T, x_TK.stride(0),
        **{f"N{g}": n for g, n in enumerate([*sizes, 0, 0, 0][:MOST])},
        **{f"F{g}": firsts[g] for g in range(1, MOST)},
        K=K, ROW=stored[0].shape[1], W=weight, BN=plan.rows, BK=plan.step,
        BT=max(16, triton.next_power_of_2(T)),
        num_warps=plan.warps, num_stages=plan.stages, **pdl_options(x_TK),
    )  # fmt: skip


@triton.jit
def one_of(
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr
):  # fmt: skip
    """The address that belongs to this program's weight, of addresses of one dtype."""
    block = tl.program_id(0)
    p_ptr = p0_ptr
    if block >= F1:
        p_ptr = p1_ptr
    if block >= F2:
        p_ptr = p2_ptr
    if block >= F3:
        p_ptr = p3_ptr
    return p_ptr


# One compiled kernel serves several numbers of rows.
@triton.jit(do_not_specialize=["T"])
def quantized_linears_few(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, s0_ptr, s1_ptr, s2_ptr, s3_ptr,
    z0_ptr, z1_ptr, z2_ptr, z3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, T, stride_x,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of every row. A row of a weight is ROW words or bytes."""
    g, w_ptr, n_N, size = rows_of(
        w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3, N0, N1, N2, N3, BN
    )  # fmt: skip
    scale_ptr = one_of(s0_ptr, s1_ptr, s2_ptr, s3_ptr, F1, F2, F3)
    zero_ptr = z0_ptr
    if z0_ptr is not None:
        zero_ptr = one_of(z0_ptr, z1_ptr, z2_ptr, z3_ptr, F1, F2, F3)
    take_turn(PDL)
    t_T = tl.arange(0, BT)
    x_1T = (x_ptr + t_T.to(tl.int64) * stride_x)[None, :]
    w_N1 = (w_ptr + n_N.to(tl.int64) * ROW)[:, None]
    first = 0 * g  # of one expert
    acc_NT = tl.zeros((BN, BT), tl.float32)
    acc_NT = add_product(
        acc_NT, w_N1, 1, scale_ptr, zero_ptr, first, n_N, n_N < size, x_1T, None, t_T, t_T < T,
        N0, K, BK, W, "evict_first",
    )  # fmt: skip
    acc_NT = rescaled(acc_NT, W, x_ptr.dtype.element_ty)
    if g0_ptr is not None:
        acc_NT = under_global(acc_NT, one_of(g0_ptr, g1_ptr, g2_ptr, g3_ptr, F1, F2, F3), first)
    write_columns(acc_NT, n_N, tl.where(g == 0, size, 0), T, b0_ptr, y0_ptr, N0, BT)
    if y1_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 1, size, 0), T, b1_ptr, y1_ptr, N1, BT)
    if y2_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 2, size, 0), T, b2_ptr, y2_ptr, N2, BT)
    if y3_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 3, size, 0), T, b3_ptr, y3_ptr, N3, BT)
