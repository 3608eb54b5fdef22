"""Linear layers of a few rows with few outputs, as routers are, in Gluon.

    linears_few_outputs    y_g = x W_gᵀ + b_g: a program has some rows of a weight, warps that share
                           them other columns

All of a weight is on its way to registers before the launch before ends. Sums of shares are added
up last, so that columns are added in one order for any number of rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_ops.kernels.triton.decode.coded import one_of, place_of_block
from moe_ops.kernels.triton.decode.linears import bias_of
from moe_ops.kernels.triton.decode.quantized_stream_gluon import store_columns
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
    """The layout of a step [S, X, 128] of weights or of rows of input: each of four threads has 32
    columns side by side."""
    X = 16 * SIZES.MW if OF_WEIGHTS else 8 * SIZES.NT
    registers = doublings(32, 2)
    registers += [[0, 8, 0]] if OF_WEIGHTS else doublings(SIZES.NT, 1, 8)
    lanes = [*doublings(4, 2, 32), *doublings(8, 1)]
    return gl.DistributedLinearLayout(
        registers, lanes, warps_of(SIZES, OF_WEIGHTS), [], [SIZES.S, X, 128]
    )


@gluon.jit
def load_floats(at_SX, step, K: gl.constexpr, layout: gl.constexpr, POLICY: gl.constexpr):
    """A step of the rows at at_SX, [S, X, 128], in the order in which the matrix unit takes columns
    of such a layout; zeros behind the last column."""
    S: gl.constexpr = layout.shape[0]
    X: gl.constexpr = layout.shape[1]
    k = step * COLUMNS_OF_STEP + gl.arange(0, COLUMNS_OF_STEP, along(layout, 2))
    at = at_SX[:, :, None] + k[None, None, :]
    if ragged(K, S):
        part = gl.arange(0, S, along(layout, 0)) * (steps_of(K, S) * COLUMNS_OF_STEP)
        mask = (k // 8 * 8)[None, None, :] < K - part[:, None, None]
        values = gl.load(at, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        values = gl.load(at, eviction_policy=POLICY)
    return values.reshape([S, X, 4, 4, 2, 4]).permute([0, 1, 3, 5, 2, 4]).reshape([S, X, 128])


# One compiled kernel serves several numbers of rows.
@gluon.jit(do_not_specialize=["T"])
def linears_few_outputs(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, b0_ptr, b1_ptr, b2_ptr, b3_ptr,
    y0_ptr, y1_ptr, y2_ptr, y3_ptr, T, stride_x,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, N3: gl.constexpr,
    F1: gl.constexpr, F2: gl.constexpr, F3: gl.constexpr, K: gl.constexpr, SIZES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program: 16 MW outputs of every row; shares are parts of the columns."""
    S: gl.constexpr = SIZES.S
    M: gl.constexpr = 16 * SIZES.MW
    N: gl.constexpr = 8 * SIZES.NT
    L: gl.constexpr = steps_of(K, S)
    of_weights: gl.constexpr = floats_layout(SIZES, True)
    of_rows: gl.constexpr = floats_layout(SIZES, False)
    unit: gl.constexpr = unit_layout(SIZES)
    g, block, size = place_of_block(F1, F2, F3, N0, N1, N2, N3)
    w_ptr = one_of(w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3)
    m = block * M + gl.arange(0, M, along(of_weights, 1))
    row_M = gl.minimum(m, size - 1)  # those behind the last are the last
    part = gl.arange(0, S, along(of_weights, 0)) * (L * COLUMNS_OF_STEP)
    w_SM = w_ptr + row_M.to(gl.int64)[None, :] * K + part[:, None]
    weights = ()
    for step in gl.static_range(L):
        w = load_floats(w_SM, step, K, of_weights, "evict_first")
        weights = weights + (w,)  # noqa: RUF005
    bias_M = bias_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, g, m, size)
    take_turn(PDL)
    n = gl.arange(0, N, along(of_rows, 1))
    part = gl.arange(0, S, along(of_rows, 0)) * (L * COLUMNS_OF_STEP)
    x_SN = x_ptr + gl.minimum(n, T - 1).to(gl.int64)[None, :] * stride_x + part[:, None]
    acc = gl.zeros([S, M, N], gl.float32, unit)
    for step in gl.static_range(L):
        x = load_floats(x_SN, step, K, of_rows, "").permute([0, 2, 1])
        x = gl.convert_layout(x, gl.DotOperandLayout(1, unit, 2), assert_trivial=True)
        w = gl.convert_layout(weights[step], gl.DotOperandLayout(0, unit, 2), assert_trivial=True)
        acc = mma_v2(w, x, acc)
    total = gl.sum(acc, 0)
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
