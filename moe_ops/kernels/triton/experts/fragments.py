"""Codes of four bits as the first operand of Hopper's matrix unit, which it takes from registers.

A consumer has 64 of a tile's 128 rows of W. Each thread loads, of two rows, the 16 bytes that it
decodes: four words for 128 columns, two for each half of a stage. What these functions share is as
in `grouped_codes.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.quantized import (
    decoded,
    half_of,
    less_zero,
    pair_fma,
    scale_pairs,
)

ROWS, STEP = gl.constexpr(128), gl.constexpr(128)  # rows of W of a tile; columns of a stage
# Of words [group, row, word] and of what belongs to four words, where the unit wants their values.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 8, 16],
    )
)  # fmt: skip
FACTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        [], [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 8, 4],
    )
)  # fmt: skip
# Of the words of half a stage [row, thread, word] of a consumer.
HALF_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 4, 2],
    )
)  # fmt: skip


@gluon.jit
def load_words(rings, stage, LOWER: gl.constexpr, GATED: gl.constexpr):
    """Words of a stage for its two halves, [64, 4, 2] each: those that a thread has side by side.
    A thread's second row is eight below its first, of the up values if there are gates."""
    codes, _, _, _ = rings
    if GATED:
        above = codes.index(2 * stage).slice(8 * LOWER, 8, 1).load(WORDS)
        below = codes.index(2 * stage + 1).slice(8 * LOWER, 8, 1).load(WORDS)
    else:
        above = codes.index(2 * stage + LOWER).slice(0, 8, 1).load(WORDS)
        below = codes.index(2 * stage + LOWER).slice(8, 8, 1).load(WORDS)
    w = gl.join(above, below).permute([0, 3, 1, 2]).reshape([ROWS // 2, 4, 2, 2])
    left, right = w.permute([0, 1, 3, 2]).split()
    left = gl.convert_layout(left, HALF_WORDS, assert_trivial=True)
    return left, gl.convert_layout(right, HALF_WORDS, assert_trivial=True)


@gluon.jit
def factors_at(tile, sizes, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr):
    """Where scales begin: of the expert, then of a thread's two rows from there; of rows that are
    not there those of the last one."""
    expert, _, _, n = tile
    N, K, out_n, _ = sizes
    a = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, FACTORS)))
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, FACTORS)))
    column = a[:, None] * 32 + g[None, :]
    if ACT[1]:
        column = gl.minimum(column + n // 2 * 128 + n % 2 * 16 + 8 * LOWER, out_n - 1)
        above = 2 * column if ACT[2] else column
        below = above + 1 if ACT[2] else above + out_n
    else:
        above = gl.minimum(column + n * 128 + 16 * LOWER, N - 1)
        below = gl.minimum(column + n * 128 + 16 * LOWER + 8, N - 1)
    DOWN: gl.constexpr = W[1]
    GROUP: gl.constexpr = W[2]
    down = 1 if DOWN == -1 else gl.cdiv(N, DOWN)
    across = 1 if GROUP == -1 else gl.cdiv(K, GROUP)
    if DOWN == -1:
        above, below = above * 0, below * 0
    else:
        above, below = above // DOWN, below // DOWN
    first = expert.to(gl.int64) * down * across
    return first, (above * across)[:, :, None], (below * across)[:, :, None], across


@gluon.jit
def load_factors(scales, at, i, W: gl.constexpr):
    """Scales and zero points of step i, as they are stored, of a thread's two rows and its columns.
    Only loads; scales for zero points that there are none of."""
    s_ptr, z_ptr = scales
    first, above, below, across = at
    GROUP: gl.constexpr = W[2]
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, FACTORS)))
    group = q * 0 if GROUP == -1 else gl.minimum((i * STEP + q * 32) // GROUP, across - 1)
    above += group[None, None, :]
    below += group[None, None, :]
    s_ptr += first
    above_s, below_s = gl.load(s_ptr + above), gl.load(s_ptr + below)
    if z_ptr is None:
        return above_s, below_s, above_s, below_s
    else:
        z_ptr += first
        return above_s, below_s, gl.load(z_ptr + above), gl.load(z_ptr + below)


@gluon.jit
def spread(above, below):
    """[64, 4, 2]: for each word of a half what is of a thread's two rows."""
    both = gl.join(above, below).permute([0, 3, 1, 2]).reshape([ROWS // 2, 4])
    return gl.convert_layout(gl.join(both, both), HALF_WORDS, assert_trivial=True)


@gluon.jit
def factor_pairs(stored, W: gl.constexpr, DTYPE: gl.constexpr):
    """(less, scale_pair) of `decoded`, of what `load_factors` gave."""
    above_s, below_s, above_z, below_z = stored
    ELEMENT: gl.constexpr = W[0]
    KIND: gl.constexpr = W[3]
    FLOAT: gl.constexpr = ELEMENT == "float4_e2m1"
    above = scale_pairs(above_s, KIND, FLOAT, DTYPE)
    pair = spread(above, scale_pairs(below_s, KIND, FLOAT, DTYPE))
    if ELEMENT == "uint4":
        less = spread(less_zero(above_z, True, DTYPE), less_zero(below_z, True, DTYPE))
    else:
        less = less_zero(above_z, False, DTYPE)
    return less, pair


@gluon.jit
def unscaled(w, less, W: gl.constexpr, DTYPE: gl.constexpr):
    """Values of half a stage before they are multiplied by scales: see `decoded`."""
    ELEMENT: gl.constexpr = W[0]
    FLOAT: gl.constexpr = ELEMENT == "float4_e2m1"
    return (
        decoded(w, 0, less, less, FLOAT, False, DTYPE),
        decoded(w, 1, less, less, FLOAT, False, DTYPE),
        decoded(w, 2, less, less, FLOAT, False, DTYPE),
        decoded(w, 3, less, less, FLOAT, False, DTYPE),
    )


@gluon.jit
def operand_of(unscaled, pair, DTYPE: gl.constexpr):
    """The first operand [64, 64] of half a stage, as tokens are ordered: see `values_of`."""
    p0, p1, p2, p3 = unscaled
    M: gl.constexpr = p0.shape[0]
    p0, p1 = times(p0, pair, DTYPE), times(p1, pair, DTYPE)
    p2, p3 = times(p2, pair, DTYPE), times(p3, pair, DTYPE)
    pairs = gl.join(gl.join(p0, p2), gl.join(p1, p3)).reshape([M, 4, 2, 4])
    pairs = pairs.permute([0, 2, 3, 1]).reshape([M, 32])
    both = gl.join(half_of(pairs, False, DTYPE), half_of(pairs, True, DTYPE))
    return both.reshape([M, 64])


@gluon.jit
def times(values, pair, DTYPE: gl.constexpr):
    return pair_fma(values, pair, -0x7FFF8000, DTYPE)  # the halves of which are -0
