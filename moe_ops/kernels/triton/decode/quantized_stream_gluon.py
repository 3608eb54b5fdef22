"""Linear layers of a few rows whose weights are codes, in Gluon.

    quantized_linears_stream    y_g = x W_gᵀ + b_g: a program has some rows of a weight, warps that
                                share them other columns

Codes stream through registers as those of experts do, in `register_stream_steps.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.decode.blocks import bias_of, one_of, place_of_block
from moe_ops.kernels.triton.experts.formats.scales import under_global
from moe_ops.kernels.triton.experts.products.register_stream_gluon import (
    product_of,
    summed,
    token_vectors,
)
from moe_ops.kernels.triton.experts.products.register_stream_steps import (
    COLUMNS_OF_STEP,
    along,
    steps_of,
    words_layout,
)


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
