"""Linear layers of a few rows with few outputs, as routers are, in Gluon.

    linears_few_outputs    y_g = x W_gᵀ + b_g: a program has some rows of a weight, warps that share
                           them other columns; x may be normed first

All of a weight is on its way to registers before the launch before ends. Sums of shares are added
up last, so that columns are added in one order for any number of rows. Every program norms all
rows for itself, each from registers where the matrix unit takes it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_ops.kernels.triton.decode.blocks import bias_of, one_of, place_of_block
from moe_ops.kernels.triton.decode.norm import normed_of, sum_at
from moe_ops.kernels.triton.decode.quantized_stream_gluon import store_columns
from moe_ops.kernels.triton.decode.rows_gluon import by_columns, eights_layout, sum_of_shares
from moe_ops.kernels.triton.experts.products.register_stream_steps import (
    COLUMNS_OF_STEP,
    along,
    doublings,
    ragged,
    steps_of,
    unit_layout,
    warps_of,
)
from moe_ops.kernels.triton.launch import take_turn


@gluon.constexpr_function
def floats_layout(SIZES, OF_WEIGHTS):
    """The layout of a step [S, X, 128] of weights or of rows of input."""
    X = 16 * SIZES.MW if OF_WEIGHTS else 8 * SIZES.NT
    rows = [[0, 8, 0]] if OF_WEIGHTS else doublings(SIZES.NT, 1, 8)
    return eights_layout(SIZES.S, X, 128, rows, warps_of(SIZES, OF_WEIGHTS))


@gluon.jit
def columns_of(step, K: gl.constexpr, layout: gl.constexpr):
    """([S, 1, 128]: the columns of a step of shares, whether they exist): eight side by side do so
    together."""
    S: gl.constexpr = layout.shape[0]
    part = gl.arange(0, S, along(layout, 0)) * (steps_of(K, S) * COLUMNS_OF_STEP)
    k = (part + step * COLUMNS_OF_STEP)[:, None, None]
    k = k + gl.arange(0, COLUMNS_OF_STEP, along(layout, 2))[None, None, :]
    return k, k // 8 * 8 < K


@gluon.jit
def load_weights(w_M, K: gl.constexpr, layout: gl.constexpr):
    """All steps [S, M, 128] of rows of a weight."""
    steps = ()
    for step in gl.static_range(steps_of(K, layout.shape[0])):
        k, inside = columns_of(step, K, layout)
        at = w_M[None, :, None] + k
        if ragged(K, layout.shape[0]):
            w = gl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
        else:
            w = gl.load(at, eviction_policy="evict_first")
        steps = steps + (w,)  # noqa: RUF005
    return steps


@gluon.jit
def load_gains(gain_ptr, K: gl.constexpr, layout: gl.constexpr):
    """The gains of all steps [S, 1, 128], if there are any."""
    gains = ()
    if gain_ptr is not None:
        for step in gl.static_range(steps_of(K, layout.shape[0])):
            k, inside = columns_of(step, K, layout)
            gains = gains + (gl.load(gain_ptr + k, mask=inside, other=0.0),)  # noqa: RUF005
    return gains


@gluon.jit
def load_rows(x_N, residual_N, K: gl.constexpr, layout: gl.constexpr):
    """All steps [S, N, 128] of rows, with what is added to them."""
    rows = ()
    for step in gl.static_range(steps_of(K, layout.shape[0])):
        k, inside = columns_of(step, K, layout)
        rows = rows + (sum_at(x_N, residual_N, k, inside),)  # noqa: RUF005
    return rows


@gluon.jit
def rows_of_input(
    x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, gains, T, stride_x, stride_r,
    K: gl.constexpr, layout: gl.constexpr, EPS: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """All steps [S, N, 128] of the rows, normed if there is a gain. Programs in turn write the sum
    of a row and what is normed. Of rows past the last one anything: columns of a product do not
    mix."""
    L: gl.constexpr = steps_of(K, layout.shape[0])
    t = gl.arange(0, layout.shape[1], along(layout, 1))
    t_N = gl.minimum(t, T - 1).to(gl.int64)[None, :, None]
    if residual_ptr is None:
        rows = load_rows(x_ptr + t_N * stride_x, residual_ptr, K, layout)
    else:
        rows = load_rows(x_ptr + t_N * stride_x, residual_ptr + t_N * stride_r, K, layout)
    if gain_ptr is not None:
        squares = rows[0] * rows[0]
        for step in gl.static_range(1, L):
            squares += rows[step] * rows[step]
        inverse = gl.rsqrt(gl.sum(gl.sum(squares, 2), 0) / K + EPS)
        inverse_N = gl.convert_layout(inverse, along(layout, 1))[None, :, None]
        mine = ((t % gl.num_programs(0) == gl.program_id(0)) & (t < T))[None, :, None]
        normed = ()
        for step in gl.static_range(L):
            k, inside = columns_of(step, K, layout)
            n = normed_of(rows[step], inverse_N, gains[step], SHIFT)
            normed = normed + (n,)  # noqa: RUF005
            gl.store(
                normed_ptr + t_N * K + k, n.to(normed_ptr.dtype.element_ty), mask=mine & inside
            )
            if sum_ptr is not None:
                s = rows[step].to(sum_ptr.dtype.element_ty)
                gl.store(sum_ptr + t_N * K + k, s, mask=mine & inside)
        rows = normed
    return rows


# One compiled kernel serves several numbers of rows.
@gluon.jit(do_not_specialize=["T"])
def linears_few_outputs(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, b0_ptr, b1_ptr, b2_ptr, b3_ptr,
    y0_ptr, y1_ptr, y2_ptr, y3_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, T, stride_x,
    stride_r,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, N3: gl.constexpr,
    F1: gl.constexpr, F2: gl.constexpr, F3: gl.constexpr, K: gl.constexpr, EPS: gl.constexpr,
    SHIFT: gl.constexpr, SIZES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: 16 MW outputs of every row; shares are parts of the columns."""
    S: gl.constexpr = SIZES.S
    M: gl.constexpr = 16 * SIZES.MW
    N: gl.constexpr = 8 * SIZES.NT
    of_weights: gl.constexpr = floats_layout(SIZES, True)
    of_rows: gl.constexpr = floats_layout(SIZES, False)
    unit: gl.constexpr = unit_layout(SIZES)
    g, block, size = place_of_block(F1, F2, F3, N0, N1, N2, N3)
    w_ptr = one_of(w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3)
    m = block * M + gl.arange(0, M, along(of_weights, 1))
    row_M = gl.minimum(m, size - 1)  # those behind the last are the last
    weights = load_weights(w_ptr + row_M.to(gl.int64) * K, K, of_weights)
    gains = load_gains(gain_ptr, K, of_rows)
    bias_M = bias_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, g, m, size)
    take_turn(PDL)
    rows = rows_of_input(
        x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, gains, T, stride_x, stride_r, K,
        of_rows, EPS, SHIFT,
    )  # fmt: skip
    acc = gl.zeros([S, M, N], gl.float32, unit)
    for step in gl.static_range(steps_of(K, S)):
        w = gl.convert_layout(
            by_columns(weights[step]), gl.DotOperandLayout(0, unit, 2), assert_trivial=True
        )
        x = by_columns(rows[step].to(w.dtype)).permute([0, 2, 1])
        x = gl.convert_layout(x, gl.DotOperandLayout(1, unit, 2), assert_trivial=True)
        acc = mma_v2(w, x, acc)
    total = sum_of_shares(acc)
    layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    if bias_M is not None:
        total += gl.convert_layout(bias_M, layout)[:, None]
    m = block * M + gl.arange(0, M, layout)
    store_columns(total, m, gl.where(g == 0, size, 0), T, y0_ptr, N0)
    if y1_ptr is not None:
        store_columns(total, m, gl.where(g == 1, size, 0), T, y1_ptr, N1)
    if y2_ptr is not None:
        store_columns(total, m, gl.where(g == 2, size, 0), T, y2_ptr, N2)
    if y3_ptr is not None:
        store_columns(total, m, gl.where(g == 3, size, 0), T, y3_ptr, N3)
