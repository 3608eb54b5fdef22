"""Codes of four bits as the first operand of Hopper's matrix unit, from registers, in float8.

A consumer has 64 of a tile's 128 rows of W: of a first product with gates rows of 32 gates and the
same 32 of the up values, which are 8 rows apart. A stage is 128 columns, four units of 32, which
the matrix unit multiplies by one instruction. Each thread loads a word of eight codes of two rows
for each unit: those of a group of 32 columns stay within one unit, so that their scale can be
multiplied into its sum. What these functions share is as in `grouped_float8_tokens.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats import to_float8
from moe_ops.kernels.triton.experts.formats.scales import finite, scale_of

ROWS = gl.constexpr(128)  # of W, of a tile
STEP = gl.constexpr(128)  # columns of a stage
UNITS = gl.constexpr(4)  # of a stage
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


@gluon.constexpr_function
def sums_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.constexpr_function
def groups_of(W):
    """The groups of columns of a stage, whose sums are scaled one by one."""
    return 128 // W.across if 0 < W.across < 128 else 1


@gluon.jit
def first_column(n, LOWER: gl.constexpr, GATED: gl.constexpr):
    """The first of the 32 or 64 columns of the output that a consumer has in a tile."""
    return n * 64 + 32 * LOWER if GATED else n * 128 + 64 * LOWER


@gluon.jit
def rows_of(n, sizes, LOWER: gl.constexpr, ACT: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of an expert's weight that a consumer has; the last one in place of one that is not
    there."""
    N, _, out_n, _ = sizes
    m = gl.arange(0, ROWS // 2, LAYOUT)
    first = first_column(n, LOWER, ACT.gated)
    if ACT.gated:
        column = gl.minimum(first + m // 16 * 8 + m % 8, out_n - 1)
        up = m // 8 % 2
        row = 2 * column + up if ACT.interleaved else column + up * out_n
    else:
        row = gl.minimum(first + m, N - 1)
    return row


@gluon.jit
def load_words(codes, stage, LOWER: gl.constexpr, GATED: gl.constexpr):
    """Words of a stage for each of its units, [64, 4]: those of a thread are of two rows."""
    if GATED:
        HALF: gl.constexpr = ROWS // 4
        gate = codes.index(2 * stage).slice(HALF * LOWER, HALF).load(PART_WORDS)
        up = codes.index(2 * stage + 1).slice(HALF * LOWER, HALF).load(PART_WORDS)
        w = gl.join(gate, up).reshape([4, 8, 16, 2]).permute([0, 3, 1, 2]).reshape([ROWS // 2, 16])
        w = gl.convert_layout(w, WORDS, assert_trivial=True)
    else:
        w = codes.index(2 * stage + LOWER).load(WORDS)
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
def factors_at(
    tile, sizes, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr, LAYOUT: gl.constexpr
):
    """(of the expert, of rows from there, of each row): where scales begin."""
    expert, _, _, n = tile
    N, K, _, _ = sizes
    row = rows_of(n, sizes, LOWER, ACT, LAYOUT)
    DOWN: gl.constexpr = W.down
    GROUP: gl.constexpr = W.across
    down = 1 if DOWN == -1 else gl.cdiv(N, DOWN)
    across = 1 if GROUP == -1 else gl.cdiv(K, GROUP)
    row = row * 0 if DOWN == -1 else row // DOWN
    return expert.to(gl.int64) * down * across, row * across, across


@gluon.jit
def load_factors(ptr, at, i, W: gl.constexpr):
    """What belongs to each group of stage i, as it is stored, of rows; that of the last group for
    one that is not there. Only loads. Words of e8m0 have those of four groups."""
    first, rows, across = at
    GROUP: gl.constexpr = W.across
    if ptr.dtype.element_ty == gl.int32:
        return (gl.load(ptr + first // 4 + (rows // 4 + gl.minimum(i, across // 4 - 1))),)
    else:
        stored = ()
        for g in gl.static_range(groups_of(W)):
            column = i * STEP + g * GROUP
            group = 0 if GROUP == -1 else gl.minimum(column // GROUP, across - 1)
            stored = stored + (gl.load(ptr + first + (rows + group)),)  # noqa: RUF005
        return stored


@gluon.constexpr_function
def folds(W):
    """Whether the scales of a stage can be part of its codes."""
    return W.element == "float4_e2m1" and W.kind == "e8m0" and W.across == 32


@gluon.jit
def four_scales(ptr, at, i, W: gl.constexpr):
    """The four e8m0 scales of stage i in one integer."""
    stored = load_factors(ptr, at, i, W)
    if len(stored) == 1:
        return stored[0]
    else:
        first = stored[0].to(gl.int32) | (stored[1].to(gl.int32) << 8)
        return first | (stored[2].to(gl.int32) << 16) | (stored[3].to(gl.int32) << 24)


@gluon.jit
def largest_of(four):
    """The largest of four bytes."""
    first = gl.maximum(four & 0xFF, (four >> 8) & 0xFF)
    return gl.maximum(first, gl.maximum((four >> 16) & 0xFF, (four >> 24) & 0xFF))


@gluon.jit
def are_near(four, largest):
    """Whether the scales of a stage are, of each row, within 2**11 of each other: then codes times
    their scale over 2**-6 of the largest are 0, or normal numbers of e4m3."""
    least = gl.minimum(four & 0xFF, (four >> 8) & 0xFF)
    least = gl.minimum(least, gl.minimum((four >> 16) & 0xFF, (four >> 24) & 0xFF))
    return gl.max(largest - least, 0) <= 11


@gluon.jit
def tables_of(four, largest, near):
    """By how much the exponents of each group's codes are more, and 5, in rows of words; 5 if
    scales are not near."""
    more = gl.where(near, four - (largest - 11) * 0x01010101, 0x05050505)
    more = gl.convert_layout(more, gl.SliceLayout(1, UNIT), assert_trivial=True)
    return more & 0xFF, (more >> 8) & 0xFF, (more >> 16) & 0xFF, (more >> 24) & 0xFF


@gluon.jit
def scale_at(stored, g: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr):
    """The scales of group g, of so many of a stage, of what `load_factors` gave; where they are
    part of the codes, what is not: 2**-6 of the largest, which is behind them."""
    KIND: gl.constexpr = W.kind
    if stored[0].dtype == gl.int32:
        if GROUPS == 1 and W.across == 32:
            return scale_of(stored[1], KIND) * 0.015625
        else:
            return scale_of((stored[0] >> (8 * g)) & 0xFF, KIND)
    else:
        return finite(scale_of(stored[g * groups_of(W) // GROUPS], KIND))


@gluon.jit
def parted_unit(words, less, u: gl.constexpr, W: gl.constexpr):
    """`to_float8.parted` of the words of unit u: `less` are zero points of its group, or by how
    much the exponents of its codes are more, or nothing."""
    if len(less) == 0:
        return to_float8.parted(words[u], None, W)
    elif W.element == "float4_e2m1":
        return to_float8.parted(words[u], less[u][:, None], W)
    else:
        zero = to_float8.less_of(less[u * groups_of(W) // UNITS])
        zero = gl.convert_layout(zero, gl.SliceLayout(1, UNIT), assert_trivial=True)
        return to_float8.parted(words[u], zero[:, None], W)


@gluon.jit
def operand_of(codes, LAYOUT: gl.constexpr):
    """The first operand [64, 32] of a unit, as tokens are ordered (`order.py`), of the first and
    the last four codes of its words, four in each int32."""
    both = gl.join(codes_of(codes[0]), codes_of(codes[1]))
    both = both.permute([0, 3, 1, 2]).reshape([ROWS // 2, 32])
    return gl.convert_layout(both, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)


@gluon.jit
def codes_of(w):
    """[64, 4, 4]: the codes in each int32 of [64, 4]."""
    w = gl.join(w, w)
    w = gl.join(w, w).reshape([ROWS // 2, 4, 4])
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
