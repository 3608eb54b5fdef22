"""Codes of four, six or eight bits as the first operand of Hopper's matrix unit, from registers.

A consumer has 64 of a tile's 128 rows of W. Each thread loads, of two rows, the 16 bytes that it
decodes: of four bits for a stage of 128 columns, two words for each half of it; of eight bits for a
stage of 64 columns, which is one half. Of six bits it has the 24 bytes of 32 columns of a stage of
128, three words of each row for each half. No box of codes has these where a thread could load them
from shared memory, so that they come from memory itself, two stages ahead. What these functions
share is as in `grouped_registers.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats.eight_bits_gluon import (
    bytes_of,
    of_float8,
    pairs_of_bytes,
)
from moe_ops.kernels.triton.experts.formats.four_bits import decoded, less_zero
from moe_ops.kernels.triton.experts.formats.halves import bits_of, half_of, pair_fma
from moe_ops.kernels.triton.experts.formats.scales import scale_pairs
from moe_ops.kernels.triton.experts.formats.six_bits import joined_8, sixes_of

ROWS = gl.constexpr(128)  # of W, of a tile
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


@gluon.constexpr_function
def columns_of(W):
    """The columns of a stage."""
    return 64 if W.bits == 8 else 128


@gluon.constexpr_function
def at_once(W):
    """The stages whose number divides that of a tile. What is loaded into registers two stages
    ahead keeps these if the code of two stages takes turns."""
    return 2 if W.bits == 6 else 1


@gluon.constexpr_function
def halves_of(W):
    """The halves of 64 columns of a stage."""
    return 1 if W.bits == 8 else 2


@gluon.constexpr_function
def group_of(W):
    """Rows of W from one group of a box to the next."""
    return 16 if W.bits == 8 else 32


@gluon.constexpr_function
def half_words(W):
    """The layout of the words of half a stage [row, thread, word] of a consumer."""
    registers = [[0, 0, 1], [8, 0, 0]] if W.bits == 4 else [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 4, W.bits // 2])


@gluon.jit
def first_column(n, LOWER: gl.constexpr, W: gl.constexpr, GATED: gl.constexpr):
    """The first column that a consumer has in a tile of outputs. In the tile's other groups its
    columns are `group_of` further on."""
    if W.bits == 8:
        return n * 64 + 8 * LOWER if GATED else n * 128 + 64 * LOWER
    elif GATED:
        return n // 2 * 128 + n % 2 * 16 + (4 if W.bits == 6 else 8) * LOWER
    else:
        return n * 128 + 16 * LOWER


@gluon.jit
def column_in(m, W: gl.constexpr, ACT: gl.constexpr):
    """The column of row m of a consumer, within a group of a tile of outputs, from the first. Of
    six bits those eight apart are a pair in h, which so comes in the same runs as of four."""
    if W.bits == 6 and ACT.kind is not None:
        return m % 4 + m // 4 % 2 * 8 + m // 8 * 4
    else:
        return m


@gluon.jit
def load_words(rings, stage, LOWER: gl.constexpr, W: gl.constexpr, GATED: gl.constexpr):
    """Words of a stage for each of its halves, [64, 4, words]: those that a thread has side by
    side. A thread's second row is eight below its first, of the up values if there are gates."""
    codes, _, _, _ = rings
    if GATED:
        above = codes.index(2 * stage).slice(8 * LOWER, 8, 1).load(WORDS)
        below = codes.index(2 * stage + 1).slice(8 * LOWER, 8, 1).load(WORDS)
    else:
        above = codes.index(2 * stage + LOWER).slice(0, 8, 1).load(WORDS)
        below = codes.index(2 * stage + LOWER).slice(8, 8, 1).load(WORDS)
    layout: gl.constexpr = half_words(W)
    w = gl.join(above, below).permute([0, 3, 1, 2])
    if W.bits == 8:
        w = w.reshape([ROWS // 2, 4, 4])
        return (gl.convert_layout(w, layout, assert_trivial=True),)
    else:
        left, right = w.reshape([ROWS // 2, 4, 2, 2]).permute([0, 1, 3, 2]).split()
        left = gl.convert_layout(left, layout, assert_trivial=True)
        return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def rows_of(n, sizes, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr):
    """A thread's two rows of an expert's weight; the last row in place of one that is not there."""
    N, _, out_n, _ = sizes
    a = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, FACTORS)))
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, FACTORS)))
    group = first_column(n, LOWER, W, ACT.gated) + a[:, None] * group_of(W)
    column = group + column_in(g, W, ACT)[None, :]
    if ACT.gated:
        column = gl.minimum(column, out_n - 1)
        above = 2 * column if ACT.interleaved else column
        below = above + 1 if ACT.interleaved else above + out_n
    else:
        above = gl.minimum(column, N - 1)
        below = gl.minimum(group + column_in(g + 8, W, ACT)[None, :], N - 1)
    return above, below


@gluon.jit
def sixes_at(w_ptr, tile, sizes, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr):
    """(pointer to an expert's codes in words of 64 bits, where a thread's two rows begin from
    there, words of a row)."""
    expert, _, _, n = tile
    N, K, _, _ = sizes
    above, below = rows_of(n, sizes, LOWER, W, ACT)
    width = K // 32 * 3
    w_ptr += expert.to(gl.int64) * N * width
    return w_ptr, (above * width)[:, :, None], (below * width)[:, :, None], width


@gluon.jit
def load_sixes(at, i):
    """Words of step i, three of each of a thread's two rows. Past the last column they are those of
    the last ones, which meet zeros."""
    w_ptr, above, below, width = at
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, FACTORS)))
    word = gl.minimum(i * 12 + q * 3, width - 3)[None, None, :]
    above, below = w_ptr + (above + word), w_ptr + (below + word)
    return (
        gl.load(above), gl.load(above + 1), gl.load(above + 2),
        gl.load(below), gl.load(below + 1), gl.load(below + 2),
    )  # fmt: skip


@gluon.jit
def words_of_sixes(loaded):
    """Three words for each half of a stage, [64, 4], of what `load_sixes` gave."""
    a, b, c, d, e, f = loaded
    p, q, r = of_both(a, d), of_both(b, e), of_both(c, f)
    left = (p.to(gl.int32), (p >> 32).to(gl.int32), q.to(gl.int32))
    return left, ((q >> 32).to(gl.int32), r.to(gl.int32), (r >> 32).to(gl.int32))


@gluon.jit
def of_both(above, below):
    """[64, 4] of what a thread's two rows have."""
    return gl.join(above, below).permute([0, 3, 1, 2]).reshape([ROWS // 2, 4])


@gluon.jit
def factors_at(tile, sizes, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr):
    """Where scales begin: of the expert, then of a thread's two rows from there."""
    expert, _, _, n = tile
    N, K, _, _ = sizes
    above, below = rows_of(n, sizes, LOWER, W, ACT)
    DOWN: gl.constexpr = W.down
    GROUP: gl.constexpr = W.across
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
    Only loads; scales for zero points that there are none of, or in groups of 16 of four bits, that
    have none, those of the right half of a stage."""
    w_scale_ptr, w_zero_ptr = scales
    first, above, below, across = at
    GROUP: gl.constexpr = W.across
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, FACTORS)))
    STEP: gl.constexpr = columns_of(W)
    group = q * 0 if GROUP == -1 else gl.minimum((i * STEP + q * (STEP // 4)) // GROUP, across - 1)
    above += group[None, None, :]
    below += group[None, None, :]
    w_scale_ptr += first
    above_s, below_s = gl.load(w_scale_ptr + above), gl.load(w_scale_ptr + below)
    if GROUP == 16 and W.bits == 4:
        # Those of 32 columns are both there or both not.
        right = gl.minimum(q * 0 + 1, across - 1 - group)[None, None, :]
        right_s = gl.load(w_scale_ptr + above + right)
        return above_s, below_s, right_s, gl.load(w_scale_ptr + below + right)
    elif w_zero_ptr is None:
        return above_s, below_s, above_s, below_s
    else:
        w_zero_ptr += first
        return above_s, below_s, gl.load(w_zero_ptr + above), gl.load(w_zero_ptr + below)


@gluon.jit
def spread(above, below, W: gl.constexpr):
    """[64, 4, words]: the factor of each word of half a stage, by which of a thread's two rows it
    is in; of six bits [64, 4]."""
    both = of_both(above, below)
    if W.bits == 6:
        return both
    else:
        both = gl.join(both, both)
        if W.bits == 8:
            both = gl.join(both, both).reshape([ROWS // 2, 4, 4])
        return gl.convert_layout(both, half_words(W), assert_trivial=True)


@gluon.jit
def less_middle(zero, DTYPE: gl.constexpr):
    """128 of bfloat16, -1024 of float16, less the zero points of uint8; twice. See `bytes_of`."""
    MIDDLE: gl.constexpr = 128.0 if DTYPE == gl.bfloat16 else -1024.0
    bits = bits_of((MIDDLE - zero.to(gl.float32)).to(DTYPE))
    return bits | (bits << 16)


@gluon.jit
def factor_pairs(stored, W: gl.constexpr, DTYPE: gl.constexpr):
    """(less, scale_pair, scale_pair of the right half of a stage) of `decoded` and `bytes_of`, of
    what `load_factors` gave."""
    above_s, below_s, above_z, below_z = stored
    ELEMENT: gl.constexpr = W.element
    KIND: gl.constexpr = W.kind
    FLOAT: gl.constexpr = ELEMENT == "float4_e2m1" or W.bits == 6
    above = scale_pairs(above_s, KIND, FLOAT, DTYPE)
    pair = spread(above, scale_pairs(below_s, KIND, FLOAT, DTYPE), W)
    right_pair = pair
    if ELEMENT == "uint4":
        less = spread(less_zero(above_z, True, DTYPE), less_zero(below_z, True, DTYPE), W)
    elif ELEMENT == "uint8":
        less = spread(less_middle(above_z, DTYPE), less_middle(below_z, DTYPE), W)
    else:
        less = less_zero(above_z, False, DTYPE)
        if W.across == 16 and W.bits == 4:
            above = scale_pairs(above_z, KIND, FLOAT, DTYPE)
            right_pair = spread(above, scale_pairs(below_z, KIND, FLOAT, DTYPE), W)
    return less, pair, right_pair


@gluon.jit
def unscaled(w, less, W: gl.constexpr, DTYPE: gl.constexpr):
    """Values of half a stage before they are multiplied by scales: see `decoded`."""
    ELEMENT: gl.constexpr = W.element
    FLOAT: gl.constexpr = ELEMENT == "float4_e2m1"
    if ELEMENT == "float8_e4m3fn":
        return of_float8(w, DTYPE)
    elif W.bits == 6:
        return sixes_of(w[0], w[1], w[2], ELEMENT, DTYPE)
    elif W.bits == 8:
        first, last = pairs_of_bytes(w)
        return bytes_of(first, less, ELEMENT, DTYPE), bytes_of(last, less, ELEMENT, DTYPE)
    else:
        pairs = ()
        for j in gl.static_range(4):
            pairs = pairs + (decoded(w, j, less, less, FLOAT, False, DTYPE),)  # noqa: RUF005
        return pairs


@gluon.jit
def operand_of(unscaled, pair, W: gl.constexpr, DTYPE: gl.constexpr):
    """The first operand [64, 64] of half a stage, as tokens are ordered: see `values_of` and
    `column_at`."""
    M: gl.constexpr = pair.shape[0]
    if W.bits == 8:
        first, last = unscaled
        pairs = gl.join(times(first, pair, DTYPE), times(last, pair, DTYPE))
    elif W.bits == 6:
        pairs = joined_8(unscaled, pair, DTYPE).reshape([M, 4, 1, 8])
    else:
        p0, p1, p2, p3 = unscaled
        p0, p1 = times(p0, pair, DTYPE), times(p1, pair, DTYPE)
        p2, p3 = times(p2, pair, DTYPE), times(p3, pair, DTYPE)
        pairs = gl.join(gl.join(p0, p2), gl.join(p1, p3)).reshape([M, 4, 2, 4])
    pairs = pairs.permute([0, 2, 3, 1]).reshape([M, 32])
    both = gl.join(half_of(pairs, False, DTYPE), half_of(pairs, True, DTYPE))
    return both.reshape([M, 64])


@gluon.jit
def times(values, pair, DTYPE: gl.constexpr):
    return pair_fma(values, pair, -0x7FFF8000, DTYPE)  # the halves of which are -0
