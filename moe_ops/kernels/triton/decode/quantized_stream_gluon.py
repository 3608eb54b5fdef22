"""Linear layers of a few rows whose weights are codes, in Gluon.

    quantized_linears_stream    y_g = x W_gᵀ + b_g: a program has some rows of a weight, warps that
                                share them other columns

Codes stream through registers as those of experts do, in `register_stream_steps.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.decode.blocks import bias_of, one_of, place_of_block
from moe_ops.kernels.triton.decode.norm import normed_of, sum_at
from moe_ops.kernels.triton.experts.formats.scales import under_global
from moe_ops.kernels.triton.experts.products.register_stream_gluon import (
    no_sums,
    product_of,
    rows_at,
    scaled_by_row,
    scales_of_rows,
    summed,
    token_vectors,
)
from moe_ops.kernels.triton.experts.products.register_stream_shared import (
    add_product_of_all,
    all_codes,
)
from moe_ops.kernels.triton.experts.products.register_stream_steps import (
    COLUMNS_OF_STEP,
    add_product_of_one,
    along,
    first_codes,
    staged,
    staged_layout,
    steps_of,
    words_layout,
)
from moe_ops.kernels.triton.launch import take_turn


@gluon.jit
def store_columns(total, row_M, end, T, y_ptr, N: gl.constexpr):
    """Store [M, tokens] at rows of one of the weights before the end, and the input's."""
    t = gl.arange(0, total.shape[1], gl.SliceLayout(0, total.type.layout))
    here = (row_M < end)[:, None] & (t < T)[None, :]
    at = t[None, :] * N + row_M[:, None]
    gl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=here)


# One compiled kernel serves several numbers of rows.
@gluon.jit(do_not_specialize=["T"])
def quantized_linears_stream(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, s0_ptr, s1_ptr, s2_ptr, s3_ptr,
    z0_ptr, z1_ptr, z2_ptr, z3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, T, stride_x,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, N3: gl.constexpr,
    F1: gl.constexpr, F2: gl.constexpr, F3: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    DTYPE: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: 16 MW MT outputs of every row; shares are parts of the columns."""
    S: gl.constexpr = SIZES.S
    M: gl.constexpr = 16 * SIZES.MW * SIZES.MT
    L: gl.constexpr = steps_of(K, S)
    words: gl.constexpr = words_layout(SIZES, W.bits)
    g, block, size = place_of_block(F1, F2, F3, N0, N1, N2, N3)
    m = block * M + gl.arange(0, M, along(words, 1))
    row_M = gl.minimum(m, size - 1)  # those behind the last are the last
    bias_M = bias_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, g, m, size)
    w_ptr = one_of(w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3)
    scale_ptr = one_of(s0_ptr, s1_ptr, s2_ptr, s3_ptr, F1, F2, F3)
    zero_ptr = z0_ptr
    if z0_ptr is not None:
        zero_ptr = one_of(z0_ptr, z1_ptr, z2_ptr, z3_ptr, F1, F2, F3)
    s, n, s_t, n_t = token_vectors(SIZES, W, 1)
    x_N = x_ptr + gl.minimum(n, T - 1).to(gl.int64) * stride_x  # columns of a product do not mix
    x_SN = x_N[None, :] + (s * (L * COLUMNS_OF_STEP))[:, None]
    tokens = (x_SN, None, 0 * s_t[:, None] + 0 * n_t[None, :])
    one_S = 0 * gl.arange(0, S, along(words, 0))  # of one expert
    acc = product_of(
        w_ptr, scale_ptr, zero_ptr, one_S, row_M, tokens, N0, K, S, W, DTYPE, P, SIZES, False, PDL
    )
    total = summed(acc, W, DTYPE)
    if g0_ptr is not None:
        total = under_global(total, one_of(g0_ptr, g1_ptr, g2_ptr, g3_ptr, F1, F2, F3), 0 * g)
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


@gluon.jit
def columns_at(step, K: gl.constexpr, SIZES: gl.constexpr):
    """[S, 1, 128]: which columns of the row are those of a step of the shares."""
    layout: gl.constexpr = staged_layout(SIZES, 1)
    L: gl.constexpr = steps_of(K, SIZES.S)
    s = gl.arange(0, SIZES.S, along(layout, 0))
    k = gl.arange(0, COLUMNS_OF_STEP, along(layout, 2))
    return (s * L + step)[:, None, None] * COLUMNS_OF_STEP + k[None, None, :]


@gluon.jit
def whole_sum(part):
    return gl.sum(gl.sum(gl.sum(part, 2), 1), 0)


@gluon.jit
def whole_max(part):
    return gl.max(gl.max(gl.max(part, 2), 1), 0)


@gluon.jit
def exponent_below(top):
    """The bits of the power of two at or below a number, as an exponent; 15 at least."""
    return gl.maximum(top.to(gl.int32, bitcast=True) >> 23, 15)


@gluon.jit
def gains_of(gain_ptr, K: gl.constexpr, SIZES: gl.constexpr):
    """The gains of all steps, if there are any."""
    gains = ()
    if gain_ptr is not None:
        for step in gl.static_range(steps_of(K, SIZES.S)):
            k = columns_at(step, K, SIZES)
            gains = gains + (gl.load(gain_ptr + k, mask=k < K, other=0.0),)  # noqa: RUF005
    return gains


@gluon.jit
def finite_size(x):
    """|x|, 0 of what is infinite or no number."""
    size = gl.abs(x)
    return gl.where(size < float("inf"), size, 0.0)


@gluon.jit
def row_of(x_ptr, residual_ptr, K: gl.constexpr, SIZES: gl.constexpr):
    """All steps of the row, with what is added to it."""
    rows = ()
    for step in gl.static_range(steps_of(K, SIZES.S)):
        k = columns_at(step, K, SIZES)
        rows = rows + (sum_at(x_ptr, residual_ptr, k, k < K),)  # noqa: RUF005
    return rows


@gluon.jit
def row_in_float16(
    x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, gains, K: gl.constexpr,
    SIZES: gl.constexpr, EPS: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """(staged steps of the row in float16, what to multiply products with it by): the row, normed
    if there is a gain, times the power of two by which its largest number is below 2**15. So
    numbers of 11 bits or fewer stay as they are, but those that are 2**-29 of the largest or less.
    The first program writes the sum and what is normed."""
    L: gl.constexpr = steps_of(K, SIZES.S)
    rows = row_of(x_ptr, residual_ptr, K, SIZES)
    if gain_ptr is not None:
        squares = rows[0] * rows[0]
        for step in gl.static_range(1, L):
            squares += rows[step] * rows[step]
        inverse = gl.rsqrt(whole_sum(squares) / K + EPS)
        normed = ()
        for step in gl.static_range(L):
            n = normed_of(rows[step], inverse, gains[step], SHIFT)
            normed = normed + (n,)  # noqa: RUF005
            k = columns_at(step, K, SIZES)
            mine = k < gl.where(gl.program_id(0) == 0, K, 0)
            gl.store(normed_ptr + k, n.to(normed_ptr.dtype.element_ty), mask=mine)
            if sum_ptr is not None:
                gl.store(sum_ptr + k, rows[step].to(sum_ptr.dtype.element_ty), mask=mine)
        rows = normed
    largest = finite_size(rows[0])
    for step in gl.static_range(1, L):
        largest = gl.maximum(largest, finite_size(rows[step]))
    exponent = exponent_below(whole_max(largest))
    power = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    parts = ()
    for step in gl.static_range(L):
        parts = parts + ((rows[step] * power).to(gl.float16),)  # noqa: RUF005
    return staged(parts), ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def quantized_row_stream(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, s0_ptr, s1_ptr, s2_ptr, s3_ptr,
    z0_ptr, z1_ptr, z2_ptr, z3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr,
    residual_ptr, gain_ptr, sum_ptr, normed_ptr,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, N3: gl.constexpr,
    F1: gl.constexpr, F2: gl.constexpr, F3: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    EPS: gl.constexpr, SHIFT: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program: 16 MW MT outputs of the one row; shares are parts of the columns. Values of
    codes are multiplied in float16, which holds them, as it does the row: see `row_in_float16`."""
    S: gl.constexpr = SIZES.S
    M: gl.constexpr = 16 * SIZES.MW * SIZES.MT
    DTYPE: gl.constexpr = gl.float16
    words: gl.constexpr = words_layout(SIZES, W.bits)
    g, block, size = place_of_block(F1, F2, F3, N0, N1, N2, N3)
    m = block * M + gl.arange(0, M, along(words, 1))
    row_M = gl.minimum(m, size - 1)  # those behind the last are the last
    w_ptr = one_of(w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3)
    scale_ptr = one_of(s0_ptr, s1_ptr, s2_ptr, s3_ptr, F1, F2, F3)
    one_S = 0 * gl.arange(0, S, along(words, 0))  # of one expert
    w_SM, here_S, at, end = rows_at(w_ptr, one_S, row_M, N0, K, S, W, SIZES, False)
    if z0_ptr is None:
        weights = (w_SM, here_S, scale_ptr, z0_ptr, at, end)
    else:
        zero_ptr = one_of(z0_ptr, z1_ptr, z2_ptr, z3_ptr, F1, F2, F3)
        weights = (w_SM, here_S, scale_ptr, zero_ptr, at, end)
    HELD: gl.constexpr = SIZES.stages > 0
    if HELD:
        codes = all_codes(weights, K, S, W, SIZES, False)
    else:
        ring = first_codes(weights, K, S, W, P, SIZES, False)
    scale = scales_of_rows(weights, W)
    bias_M = bias_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, g, m, size)
    gains = gains_of(gain_ptr, K, SIZES)
    take_turn(PDL)
    steps, factor = row_in_float16(
        x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, gains, K, SIZES, EPS, SHIFT
    )
    _, _, s_t, n_t = token_vectors(SIZES, W, 1)
    one = (steps, None, 0 * s_t[:, None] + 0 * n_t[None, :])
    acc = no_sums(SIZES)
    if HELD:
        acc = add_product_of_all(acc, codes, one, K, S, W, DTYPE, SIZES)
    else:
        acc = add_product_of_one(acc, weights, ring, one, K, S, W, DTYPE, P, SIZES, False)
    total = summed(scaled_by_row(acc, scale, W), W, DTYPE) * factor
    if g0_ptr is not None:
        total = under_global(total, one_of(g0_ptr, g1_ptr, g2_ptr, g3_ptr, F1, F2, F3), 0 * g)
    layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    if bias_M is not None:
        total += gl.convert_layout(bias_M, layout)[:, None]
    m = block * M + gl.arange(0, M, layout)
    store_columns(total, m, gl.where(g == 0, size, 0), 1, y0_ptr, N0)
    if y1_ptr is not None:
        store_columns(total, m, gl.where(g == 1, size, 0), 1, y1_ptr, N1)
    if y2_ptr is not None:
        store_columns(total, m, gl.where(g == 2, size, 0), 1, y2_ptr, N2)
    if y3_ptr is not None:
        store_columns(total, m, gl.where(g == 3, size, 0), 1, y3_ptr, N3)
