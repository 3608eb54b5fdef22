"""Codes of four bits as the first operand of Hopper's matrix unit, from registers, in float8.

A consumer has 64 of a tile's 128 rows of W: of a first product with gates rows of 32 gates and the
same 32 of the up values, which are 8 rows apart. A stage is two halves of 128 columns, each of four
units of 32, which the matrix unit multiplies by one instruction. Each thread loads a word of eight
codes of two rows for each unit: those of a group of 32 columns stay within one unit, so that their
scale can be multiplied into its sum. What these functions share is as in
`grouped_float8_tokens.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats import to_float8
from moe_ops.kernels.triton.experts.formats.scales import finite, scale_of

ROWS = gl.constexpr(128)  # of W, of a tile
STEP = gl.constexpr(256)  # columns of a stage
HALF = gl.constexpr(128)  # columns of half a stage
UNITS = gl.constexpr(4)  # of half a stage
# Of the words of 8 rows of gates or up values for each warp of a consumer [row, word].
PART_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
    )
)  # fmt: skip
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 4], [0, 8], [8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 16],
    )
)  # fmt: skip
# Those of one unit.
UNIT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)  # fmt: skip
# What belongs to rows.
OF_ROWS = gl.constexpr(
    gl.DistributedLinearLayout([[8]], [[0], [0], [1], [2], [4]], [[16], [32]], [], [64])
)


@gluon.constexpr_function
def sums_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.constexpr_function
def groups_of(W):
    """The groups of columns of half a stage, whose sums are scaled one by one: four or one."""
    return 4 if W.across == 32 else 1


@gluon.constexpr_function
def in_words(W):
    """Whether the scales of half a stage are the four bytes of a word."""
    return W.kind == "e8m0" and W.across == 32


@gluon.jit
def first_column(n, LOWER: gl.constexpr, GATED: gl.constexpr):
    """The first of the 32 or 64 columns of the output that a consumer has in a tile."""
    return n * 64 + 32 * LOWER if GATED else n * 128 + 64 * LOWER


@gluon.jit
def rows_of(n, sizes, LOWER: gl.constexpr, ACT: gl.constexpr):
    """The rows of an expert's weight that a consumer has; the last one in place of one that is not
    there."""
    N, _, out_n, _ = sizes
    m = gl.arange(0, ROWS // 2, OF_ROWS)
    first = first_column(n, LOWER, ACT.gated)
    if ACT.gated:
        column = gl.minimum(first + m // 16 * 8 + m % 8, out_n - 1)
        up = m // 8 % 2
        row = 2 * column + up if ACT.interleaved else column + up * out_n
    else:
        row = gl.minimum(first + m, N - 1)
    return row


@gluon.jit
def load_words(codes, stage, half: gl.constexpr, LOWER: gl.constexpr, GATED: gl.constexpr):
    """Words of half a stage for each of its units, [64, 4]: those of a thread are of two rows."""
    if GATED:
        PART: gl.constexpr = ROWS // 4
        gate = codes.index(2 * stage).slice(PART * LOWER, PART).slice(16 * half, 16, dim=1)
        up = codes.index(2 * stage + 1).slice(PART * LOWER, PART).slice(16 * half, 16, dim=1)
        w = gl.join(gate.load(PART_WORDS), up.load(PART_WORDS)).reshape([4, 8, 16, 2])
        w = w.permute([0, 3, 1, 2]).reshape([ROWS // 2, 16])
        w = gl.convert_layout(w, WORDS, assert_trivial=True)
    else:
        w = codes.index(2 * stage + LOWER).slice(16 * half, 16, dim=1).load(WORDS)
    evens, odds = w.reshape([ROWS // 2, 2, 2, 4]).permute([0, 1, 3, 2]).split()
    first, third = evens.permute([0, 2, 1]).split()
    second, fourth = odds.permute([0, 2, 1]).split()
    return (
        gl.convert_layout(first, UNIT, assert_trivial=True),
        gl.convert_layout(second, UNIT, assert_trivial=True),
        gl.convert_layout(third, UNIT, assert_trivial=True),
        gl.convert_layout(fourth, UNIT, assert_trivial=True),
    )


@gluon.jit
def factors_at(tile, sizes, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr):
    """(of the expert, of rows from there, of each row): where scales begin."""
    expert, _, _, n = tile
    N, K, _, _ = sizes
    row = rows_of(n, sizes, LOWER, ACT)
    DOWN: gl.constexpr = W.down
    GROUP: gl.constexpr = W.across
    down = 1 if DOWN == -1 else gl.cdiv(N, DOWN)
    across = 1 if GROUP == -1 else gl.cdiv(K, GROUP)
    row = row * 0 if DOWN == -1 else row // DOWN
    return expert.to(gl.int64) * down * across, row * across, across


@gluon.jit
def load_factors(ptr, at, i, W: gl.constexpr):
    """What belongs to each group of stage i, as it is stored, of rows; that of the last group for
    one that is not there. Only loads. Of scales that are in words these come, if memory has them
    so: one of all groups, or one of each half."""
    first, rows, across = at
    GROUP: gl.constexpr = W.across
    TYPE: gl.constexpr = ptr.dtype.element_ty
    SIZE: gl.constexpr = 8 if TYPE == gl.int64 else 4 if TYPE == gl.int32 else 1
    GROUPS: gl.constexpr = 8 // SIZE if in_words(W) else 2 * groups_of(W)
    stored = ()
    for g in gl.static_range(GROUPS):
        # The last one: those of K columns fill words where these come.
        group = 0 if GROUP == -1 else gl.minimum(i * (STEP // GROUP) + g * SIZE, across - SIZE)
        stored = stored + (gl.load(ptr + first // SIZE + (rows // SIZE + group // SIZE)),)  # noqa: RUF005
    return stored


@gluon.jit
def as_words(stored, W: gl.constexpr):
    """What `load_factors` gave: of scales that are in words one of each half."""
    if not in_words(W):
        return stored
    elif len(stored) == 1:
        return stored[0].to(gl.int32), (stored[0] >> 32).to(gl.int32)
    elif len(stored) == 2:
        return stored
    else:
        left, right = stored[0].to(gl.int32), stored[4].to(gl.int32)
        for g in gl.static_range(1, 4):
            left = left | (stored[g].to(gl.int32) << (8 * g))
            right = right | (stored[4 + g].to(gl.int32) << (8 * g))
        return left, right


@gluon.jit
def of_rows(x, T: gl.constexpr):
    """[64, 1] of what belongs to rows, for sums of T tokens."""
    layout: gl.constexpr = gl.SliceLayout(1, sums_layout(T))
    return gl.convert_layout(x, layout, assert_trivial=True)[:, None]


@gluon.jit
def scale_at(stored, g: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr):
    """The scales of group g of a stage, of so many of each half, of what `as_words` gave. Those
    that are NaN are infinity where they are in words: see `nan_words`."""
    KIND: gl.constexpr = W.kind
    if in_words(W):
        word = stored[g // 4]
        bits = (word << (23 - g % 4 * 8)) if g % 4 < 3 else (word >> 1)
        # 2**-127 is subnormal.
        return gl.maximum(bits & 0x7F800000, 1 << 22).to(gl.float32, bitcast=True)
    else:
        return finite(scale_of(stored[g * groups_of(W) // GROUPS], KIND))


@gluon.jit
def nan_words(seen, stored, W: gl.constexpr):
    """What was seen of words of a row so far, with those of a stage: a highest bit for every byte
    of 255, which is NaN."""
    if in_words(W):
        for half in gl.static_range(2):
            seen = seen | (((stored[half] & 0x7F7F7F7F) + 0x01010101) & stored[half])
    return seen


@gluon.jit
def parted_unit(words, less, u: gl.constexpr, half: gl.constexpr, W: gl.constexpr):
    """`to_float8.parted` of the words of unit u of half a stage: `less` are zero points of groups,
    or nothing."""
    if len(less) == 0:
        return to_float8.parted(words[u], None, W)
    else:
        zero = to_float8.less_of(less[(half * UNITS + u) * groups_of(W) // UNITS])
        zero = gl.convert_layout(zero, gl.SliceLayout(1, UNIT), assert_trivial=True)
        return to_float8.parted(words[u], zero[:, None], W)


@gluon.jit
def row_references(ptr, tile, sizes, LOWER: gl.constexpr, ACT: gl.constexpr):
    """What `references` found of rows."""
    N = sizes[0]
    row = rows_of(tile[3], sizes, LOWER, ACT)
    return gl.load(ptr + tile[0].to(gl.int64) * N + row).to(gl.int32)


@gluon.jit
def folded_unit(words, more, u: gl.constexpr):
    """The words of unit u, and the magnitudes of their codes by how much the exponents of its
    scales, the bytes of `more`, are above the least one."""
    exponent = gl.convert_layout(
        (more >> (8 * u)) & 0xFF, gl.SliceLayout(1, UNIT), assert_trivial=True
    )
    return words[u], to_float8.folded(words[u], exponent[:, None])


@gluon.jit
def operand_of(codes, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """The first operand [64, 32] of a unit, as tokens are ordered (`order.py`), of the even and the
    odd codes of its words, four in each int32."""
    both = gl.join(codes_of(codes[0], DTYPE), codes_of(codes[1], DTYPE))
    both = both.permute([0, 3, 1, 2]).reshape([ROWS // 2, 32])
    return gl.convert_layout(both, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)


@gluon.jit
def codes_of(w, DTYPE: gl.constexpr):
    """[64, 4, 4]: the codes in each int32 of [64, 4]."""
    w = gl.join(w, w)
    w = gl.join(w, w).reshape([ROWS // 2, 4, 4])
    if DTYPE == gl.float8e5:
        return gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r,r", [w], dtype=gl.float8e5, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r,r", [w], dtype=gl.float8e4nv, is_pure=True, pack=4
        )


@gluon.jit
def side_by_side(left, right, LAYOUT: gl.constexpr):
    """Two first operands as one of twice the columns."""
    M: gl.constexpr = left.shape[0]
    C: gl.constexpr = left.shape[1]
    both = gl.join(left, right).permute([0, 2, 1]).reshape([M, 2 * C])
    return gl.convert_layout(both, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)
