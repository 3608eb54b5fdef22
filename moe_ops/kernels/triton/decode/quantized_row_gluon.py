"""Linear layers of one row whose weights are codes of 8 bits, through the matrix units, in Gluon.

    quantized_row_stream    y_g = x W_gᵀ + b_g: a program has some rows of a weight, warps that
                            share them other columns; x may be normed first

Values of codes are multiplied in float16, which takes a third of the instructions that bfloat16
does: it holds them, and the row, too, once a power of two brings its largest number there. All of a
weight is on its way to registers before the launch before ends. The row lies in shared memory, so
that it is waited for once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.decode.blocks import bias_of, one_of, place_of_block
from moe_ops.kernels.triton.decode.norm import normed_of, sum_at
from moe_ops.kernels.triton.decode.quantized_stream_gluon import store_columns
from moe_ops.kernels.triton.decode.rows_gluon import sum_of_shares
from moe_ops.kernels.triton.experts.formats.scales import group_row, rescaled, under_global
from moe_ops.kernels.triton.experts.products.register_stream_steps import (
    COLUMNS_OF_STEP,
    add_step,
    along,
    doublings,
    load_all,
    steps_of,
    tokens_layout,
    unit_layout,
    warps_of,
    words_layout,
)
from moe_ops.kernels.triton.launch import take_turn


@gluon.constexpr_function
def row_layout(SIZES):
    """The layout in which a step of the row [S, 1, 128] is loaded: each share's warps have it."""
    lanes = doublings(32, 2, 4)
    shape = [SIZES.S, 1, 128]
    warps = warps_of(SIZES, False)
    return gl.DistributedLinearLayout(doublings(4, 2), lanes, warps, [], shape)


@gluon.jit
def columns_at(step, K: gl.constexpr, SIZES: gl.constexpr):
    """[S, 1, 128]: which columns of the row are those of a step of the shares."""
    layout: gl.constexpr = row_layout(SIZES)
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
def staged(parts):
    """Steps [S, 1, 128] of the row, each in shared memory as [S, 128]."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    steps = ()
    for i in gl.static_range(len(parts)):
        part = parts[i].reshape([parts[i].shape[0], parts[i].shape[2]])
        held = gl.allocate_shared_memory(part.dtype, part.shape, plain)
        held.store(part)
        steps = steps + (held,)  # noqa: RUF005
    return steps


@gluon.jit
def load_staged(held, W: gl.constexpr, SIZES: gl.constexpr):
    """A step of the row for all columns of a tile, where the matrix unit takes it."""
    layout: gl.constexpr = tokens_layout(SIZES, W.bits, 1)
    S: gl.constexpr = SIZES.S
    N: gl.constexpr = 8 * SIZES.NT
    x = held.load(gl.SliceLayout(1, layout))[:, None, :]
    x, _ = gl.broadcast(x, gl.zeros([S, N, COLUMNS_OF_STEP], x.dtype, layout))
    return x


@gluon.jit
def first_codes(weights, K: gl.constexpr, W: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr):
    """What `load_all` gives of the first steps, up to P of them."""
    ring = (load_all(weights, 0, K, SIZES.S, W, SIZES, False),)
    for p in gl.static_range(1, P):
        if p < steps_of(K, SIZES.S):
            ring = ring + (load_all(weights, p, K, SIZES.S, W, SIZES, False),)  # noqa: RUF005
    return ring


@gluon.jit
def add_row(
    acc, weights, ring, steps, K: gl.constexpr, W: gl.constexpr, P: gl.constexpr,
    SIZES: gl.constexpr,
):  # fmt: skip
    """acc and the products of all steps with those of the row."""
    L: gl.constexpr = steps_of(K, SIZES.S)
    for step in gl.static_range(L):
        now = (ring[0], load_staged(steps[step], W, SIZES), weights[4])
        ring = ring[1:]
        if step + P < L:
            new = load_all(weights, step + P, K, SIZES.S, W, SIZES, False)
            ring = ring + (new,)  # noqa: RUF005
        acc = add_step(acc, now, W, gl.float16, SIZES)
    return acc


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
    words: gl.constexpr = words_layout(SIZES, W.bits)
    g, block, size = place_of_block(F1, F2, F3, N0, N1, N2, N3)
    m = block * M + gl.arange(0, M, along(words, 1))
    row_M = gl.minimum(m, size - 1)  # those behind the last are the last
    w_ptr = one_of(w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3)
    scale_ptr = one_of(s0_ptr, s1_ptr, s2_ptr, s3_ptr, F1, F2, F3)
    part_S = gl.arange(0, S, along(words, 0)) * (steps_of(K, S) * COLUMNS_OF_STEP)
    row_SM = row_M.to(gl.int64)[None, :] * (K // 4)
    w_SM = w_ptr + row_SM + (part_S // 4)[:, None]
    one_S = 0 * part_S  # of one expert
    at = group_row(one_S[:, None], row_M[None, :], N0, K, W).to(gl.int32)
    end = at + (1 if W.across == -1 else gl.cdiv(K, W.across))
    if W.across != -1:
        at += (part_S // W.across)[:, None]
    unit: gl.constexpr = unit_layout(SIZES)
    at = gl.convert_layout(at, gl.SliceLayout(2, unit))
    end = gl.convert_layout(end, gl.SliceLayout(2, unit))
    weights = (w_SM, one_S, scale_ptr, z0_ptr, at, end)  # of 8 bits there are no zero points
    ring = first_codes(weights, K, W, P, SIZES)
    bias_M = bias_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, g, m, size)
    gains = gains_of(gain_ptr, K, SIZES)
    take_turn(PDL)
    steps, factor = row_in_float16(
        x_ptr, residual_ptr, gain_ptr, sum_ptr, normed_ptr, gains, K, SIZES, EPS, SHIFT
    )
    acc = gl.zeros([S, M, 8 * SIZES.NT], gl.float32, unit)
    acc = add_row(acc, weights, ring, steps, K, W, P, SIZES)
    total = rescaled(sum_of_shares(acc), W, gl.float16) * factor
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
