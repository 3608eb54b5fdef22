"""The experts for one token, and for few rows an expert, on quantised weights, in Gluon.

    one_up     h[p] = weight[p] * activate(W13[e] x + b13[e]) for each choice p of a token, of e
    one_down   out = sum over p of W2[e] h[p] + weight[p] * b2[e], plus the residual if there is one
    few_up     h[r] = weight * activate(W13[e] x[token of r] + b13[e]), rows sorted by expert
    few_down   y[r] = W2[e] h[r] + weight * b2[e]

A gate and the up value beside it are eight rows of a tile apart, where a thread has both.
Biases of the first product are loaded ahead of it: behind it a load is in line with all that the
next launch prefetches. The second product has no registers left for that.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.experts.formats.codes import by_row
from moe_ops.kernels.triton.experts.formats.scales import (
    factor_at,
    finite,
    group_row,
    rescaled,
    scale_of,
    under_global,
)
from moe_ops.kernels.triton.experts.products.register_stream_adapters import (
    add_adapter,
    add_to_one,
)
from moe_ops.kernels.triton.experts.products.register_stream_steps import (
    COLUMNS_OF_STEP,
    add_product,
    along,
    leaves_sum,
    of_one,
    part_groups,
    scales_layout,
    steps_of,
    token_groups,
    token_layout,
    tokens_layout,
    unit_layout,
    words_layout,
)
from moe_ops.kernels.triton.experts.schedule.sort import local_ids, unit_of
from moe_ops.kernels.triton.launch import take_turn


@gluon.jit
def product_of(
    w_ptr, w_scale_ptr, w_zero_ptr, e_S, row_M, tokens, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    C: gl.constexpr, W: gl.constexpr, DTYPE: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr,
    SOME: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """[S, M, N]: products of rows of the experts of shares with tokens; of SOME shares, those whose
    expert is not -1."""
    BITS: gl.constexpr = W.bits
    GROUP: gl.constexpr = W.across
    WORD: gl.constexpr = 64 if BITS == 6 else 32  # bits of a word as it is loaded
    words: gl.constexpr = words_layout(SIZES, BITS)
    mma: gl.constexpr = unit_layout(SIZES)
    S: gl.constexpr = words.shape[0]
    M: gl.constexpr = words.shape[1]
    N: gl.constexpr = 8 * SIZES.NT
    part_S = gl.arange(0, S, along(words, 0)) % C * (steps_of(COLUMNS, C) * COLUMNS_OF_STEP)
    here_S = e_S >= 0
    if SOME:
        e_S = gl.maximum(e_S, 0)
    e_S = e_S.to(gl.int64)
    row_SM = e_S[:, None] * ROWS + row_M[None, :]
    w_SM = w_ptr + row_SM * (COLUMNS * BITS // WORD) + (part_S * BITS // WORD)[:, None]
    at = group_row(e_S[:, None], row_M[None, :], ROWS, COLUMNS, W).to(gl.int32)
    end = gl.where(here_S[:, None], at + (1 if GROUP == -1 else gl.cdiv(COLUMNS, GROUP)), 0)
    if GROUP != -1:
        at += (part_S // GROUP)[:, None]
    if leaves_sum(W, SIZES):
        at = gl.convert_layout(at, gl.SliceLayout(2, mma))
        end = gl.convert_layout(end, gl.SliceLayout(2, mma))
    else:
        layout: gl.constexpr = scales_layout(SIZES, GROUP)
        EACH: gl.constexpr = COLUMNS_OF_STEP // layout.shape[2]
        group = gl.arange(0, layout.shape[2], along(layout, 2)) * EACH
        group = 0 * group if GROUP == -1 else group // GROUP
        at = gl.convert_layout(at, gl.SliceLayout(2, layout))[:, :, None] + group[None, None, :]
        end = gl.convert_layout(end, gl.SliceLayout(2, layout))[:, :, None]
    acc = gl.zeros([S, M, N], gl.float32, mma)
    weights = (w_SM, here_S, w_scale_ptr, w_zero_ptr, at, end)
    acc, row_scale = add_product(acc, weights, tokens, COLUMNS, C, W, DTYPE, P, SIZES, SOME, WAIT)
    if by_row(W):
        KIND: gl.constexpr = W.kind
        scale = finite(scale_of(gl.load(w_scale_ptr + at, mask=at < end, other=0), KIND))
        if tokens[0].dtype.element_ty != gl.int32:
            t = of_one(row_scale, gl.SliceLayout(1, mma))
            if tokens[1] is not None:
                t *= gl.load(tokens[1] + tokens[2], mask=tokens[2] >= 0, other=0.0).to(gl.float32)
        else:
            t = gl.load(tokens[1] + tokens[2], mask=tokens[2] >= 0, other=0.0)
        acc *= scale[:, :, None] * t[:, None, :]
    return acc


@gluon.jit
def up_rows(block, M: gl.constexpr, I: gl.constexpr, ACT: gl.constexpr, layout: gl.constexpr):
    """Rows of w13 of a tile, the last ones instead of those outside; gates and up values are eight
    rows apart."""
    m = gl.arange(0, M, layout)
    if ACT.gated:
        i = gl.minimum(block * (M // 2) + m // 16 * 8 + m % 8, I - 1)
        up = m // 8 % 2
        row = 2 * i + up if ACT.interleaved else i + up * I
    else:
        row = gl.minimum(block * M + m, I - 1)
    return row


@gluon.jit
def biases_at(bias_ptr, offset, row_M):
    """The biases of rows that are there, None without any."""
    bias_M = None
    if bias_ptr is not None:
        bias_M = gl.load(bias_ptr + offset + row_M)
    return bias_M


@gluon.jit
def add_bias(acc, bias_M):
    """acc [M, N] and the biases of its rows, if any, which may have another layout."""
    if bias_M is not None:
        layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        acc += gl.convert_layout(bias_M, layout).to(gl.float32)[:, None]
    return acc


@gluon.jit
def under_globals(acc, global_scale_ptr, e, row_M, ROWS: gl.constexpr, SHARED: gl.constexpr):
    """acc [M, N] of the first product, times the global scales of its rows, if any."""
    if global_scale_ptr is not None:
        if SHARED == "":
            acc = under_global(acc, global_scale_ptr, e)
        else:
            factor_M = gl.load(global_scale_ptr + factor_at(e, row_M, ROWS, SHARED))
            layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
            acc *= gl.convert_layout(factor_M, layout)[:, None]
    return acc


@gluon.jit
def activated(acc, ACT: gl.constexpr):
    """h [columns, N] of a tile's sums [M, N]."""
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    if ACT.gated:
        gate, up = acc.reshape([M // 16, 2, 8, N]).permute([0, 2, 3, 1]).split()
        h = activate_gated(gate, up, ACT).reshape([M // 2, N])
    else:
        h = activate(acc, ACT)
    return h


@gluon.jit
def summed(acc, W: gl.constexpr, DTYPE: gl.constexpr):
    """The sum over shares, [M, N]."""
    if acc.shape[0] == 1:
        return rescaled(acc.reshape([acc.shape[1], acc.shape[2]]), W, DTYPE)
    else:
        return rescaled(gl.sum(acc, 0), W, DTYPE)


@gluon.jit
def token_vectors(SIZES: gl.constexpr, W: gl.constexpr, EACH: gl.constexpr):
    """(shares, tokens) as `load_tokens` has them, and as sums do. One token that is rounded comes
    once, and not for each column of a tile."""
    if W.inputs_8 and EACH == 1:
        tokens: gl.constexpr = token_layout(SIZES)
    else:
        tokens: gl.constexpr = tokens_layout(SIZES, W.bits, EACH)
    sums: gl.constexpr = gl.SliceLayout(1, unit_layout(SIZES))
    return (
        gl.arange(0, SIZES.S, along(tokens, 0)),
        gl.arange(0, tokens.shape[1], along(tokens, 1)),
        gl.arange(0, SIZES.S, gl.SliceLayout(1, sums)),
        gl.arange(0, 8 * SIZES.NT, gl.SliceLayout(0, sums)),
    )


@gluon.jit
def store_h(h_ptr, h, row_N, inside_N, block, I: gl.constexpr):
    """h [columns, N] of a tile to rows of h."""
    layout: gl.constexpr = h.type.layout
    i = block * h.shape[0] + gl.arange(0, h.shape[0], gl.SliceLayout(1, layout))
    at = row_N.to(gl.int64)[None, :] * I + i[:, None]
    gl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=(i < I)[:, None] & inside_N[None, :])


@gluon.jit
def one_up(
    x_ptr, x_scale_ptr, ids_ptr, weights_ptr, expert_map_ptr, w_ptr, w_scale_ptr, w_zero_ptr,
    global_scale_ptr, bias_ptr, h_ptr, N_MAP, stride_be, narrow_ptr, wide_ptr, index_ptr, stride_bg,
    stride_bf, stride_br,
    E: gl.constexpr, D: gl.constexpr, I: gl.constexpr, ACT: gl.constexpr, W: gl.constexpr,
    SHARED: gl.constexpr, DTYPE: gl.constexpr, ADAPTERS: gl.constexpr, RANK: gl.constexpr,
    TR: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: some columns of h for one choice; shares are parts of the columns of x."""
    S: gl.constexpr = SIZES.S
    M: gl.constexpr = 16 * SIZES.MW * SIZES.MT
    ROWS: gl.constexpr = 2 * I if ACT.gated else I
    blocks: gl.constexpr = (ROWS + M - 1) // M
    EACH: gl.constexpr = 4 if x_ptr.dtype.element_ty == gl.int32 else 1
    L: gl.constexpr = steps_of(D, S)
    pair = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    if narrow_ptr is None:
        take_turn(PDL)
    e = local_ids(ids_ptr, expert_map_ptr, pair, True, E, N_MAP)
    if e >= E:
        if narrow_ptr is not None:
            take_turn(PDL)
        return
    words: gl.constexpr = words_layout(SIZES, W.bits)
    row_M = up_rows(block, M, I, ACT, along(words, 1))
    s, n, s_t, n_t = token_vectors(SIZES, W, EACH)
    # The one token for all columns of a tile, of which the first counts.
    x_SN = x_ptr + (s * (L * COLUMNS_OF_STEP // EACH))[:, None] + 0 * n[None, :]
    tokens = (x_SN, x_scale_ptr, (s_t * part_groups(D, S, W))[:, None] + 0 * n_t[None, :])
    if by_row(W) and EACH == 1:
        tokens = (x_SN, None, tokens[2], (x_ptr, 0 * s))
    e_S = e + 0 * gl.arange(0, S, along(words, 0))
    bias_M = biases_at(bias_ptr, e.to(gl.int64) * stride_be, row_M)
    acc = product_of(
        w_ptr, w_scale_ptr, w_zero_ptr, e_S, row_M, tokens, ROWS, D, S, W, DTYPE, P, SIZES, False,
        False,
    )  # fmt: skip
    acc = under_globals(summed(acc, W, DTYPE), global_scale_ptr, e, row_M, ROWS, SHARED)
    if narrow_ptr is not None:
        take_turn(PDL)  # what is added is made by the launch before, and nothing else
        of_adapter = (narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br)
        acc = add_adapter(acc, e, row_M, pair, 1, 0, of_adapter, E, ADAPTERS, RANK, TR, SIZES)
    acc = add_bias(acc, bias_M)
    h = activated(acc, ACT)
    if weights_ptr is not None and not by_row(W):
        h *= gl.load(weights_ptr + pair).to(gl.float32)
    n = gl.arange(0, h.shape[1], gl.SliceLayout(0, h.type.layout))
    store_h(h_ptr, h, pair + n, n < 1, block, I)


@gluon.constexpr_function
def shares_layout(SIZES):
    """The layout of [S, M] in which a thread has all shares of a row."""
    return gl.BlockedLayout([SIZES.S, 1], [1, 32], [1, SIZES.S * SIZES.MW], [0, 1])


@gluon.jit
def shares_of(part, SIZES: gl.constexpr):
    """The first columns [M] of each share of [S, M, N]."""
    S: gl.constexpr = part.shape[0]
    M: gl.constexpr = part.shape[1]
    n = gl.arange(0, part.shape[2], along(part.type.layout, 2))
    rows = gl.sum(gl.where((n == 0)[None, None, :], part, 0.0), 2)
    rows = gl.convert_layout(rows, shares_layout(SIZES))
    pieces = (rows.permute([1, 0]),)
    for i in gl.static_range(S.bit_length() - 1):
        pieces = halved(pieces, M, S >> (i + 1))
    found = ()
    for s in gl.static_range(S):
        row = gl.convert_layout(pieces[s].reshape([M]), gl.SliceLayout(0, shares_layout(SIZES)))
        found = found + (row,)  # noqa: RUF005
    return found


@gluon.jit
def halved(pieces, M: gl.constexpr, HALF: gl.constexpr):
    """The left and the right half of each of some [M, 2 HALF]."""
    found = ()
    for i in gl.static_range(len(pieces)):
        found = found + pieces[i].reshape([M, 2, HALF]).permute([0, 2, 1]).split()
    return found


@gluon.jit
def add_choice(
    total, row, pair, ids_ptr, weights_ptr, expert_map_ptr, bias_ptr, N_MAP, stride_be,
    E: gl.constexpr, D: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """total and a row of y, once rounded, times the weight of its choice."""
    layout: gl.constexpr = row.type.layout
    M: gl.constexpr = row.shape[0]
    e = local_ids(ids_ptr, expert_map_ptr, pair, True, E, N_MAP)
    d = gl.program_id(0) * M + gl.arange(0, M, layout)
    if bias_ptr is not None:
        bias_at = bias_ptr + e.to(gl.int64) * stride_be + d
        row += gl.load(bias_at, mask=(d < D) & (e < E), other=0.0).to(gl.float32)
    row = row.to(DTYPE).to(gl.float32)
    weight = gl.load(weights_ptr + pair, mask=e < E, other=0.0).to(gl.float32)
    weights = weight + gl.zeros([M], gl.float32, layout)
    return gl.fma(row, weights, total)


@gluon.jit
def one_down(
    h_ptr, h_scale_ptr, ids_ptr, weights_ptr, expert_map_ptr, w_ptr, w_scale_ptr, w_zero_ptr,
    global_scale_ptr, bias_ptr, residual_ptr, out_ptr, N_MAP, stride_be, narrow_ptr, wide_ptr,
    index_ptr, stride_bg, stride_bf, stride_br,
    E: gl.constexpr, K: gl.constexpr, D: gl.constexpr, I: gl.constexpr, W: gl.constexpr,
    DTYPE: gl.constexpr, ADAPTERS: gl.constexpr, RANK: gl.constexpr, TR: gl.constexpr,
    C: gl.constexpr, ORDERED: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program: some rows of out; shares are C parts of the columns of S / C choices. ORDERED:
    each is a choice, rounded as `few_down` does, and added as the sum of its rows does."""
    S: gl.constexpr = SIZES.S
    M: gl.constexpr = 16 * SIZES.MW * SIZES.MT
    EACH: gl.constexpr = 4 if h_ptr.dtype.element_ty == gl.int32 else 1
    L: gl.constexpr = steps_of(I, C)
    GROUPS: gl.constexpr = token_groups(I, W)
    words: gl.constexpr = words_layout(SIZES, W.bits)
    d = gl.minimum(gl.program_id(0) * M + gl.arange(0, M, along(words, 1)), D - 1)
    s, n, s_t, n_t = token_vectors(SIZES, W, EACH)
    s_w = gl.arange(0, S, along(words, 0))
    ROUNDS: gl.constexpr = (K * C + S - 1) // S
    N: gl.constexpr = 8 * SIZES.NT
    acc = gl.zeros([S, M, N], gl.float32, unit_layout(SIZES))
    of_rows: gl.constexpr = gl.SliceLayout(0, shares_layout(SIZES))
    total = gl.zeros([M], gl.float32, of_rows)
    for round in gl.static_range(ROUNDS):
        first = round * (S // C)
        pair = first + s_w // C
        # Who chose the experts ended two launches ago.
        e_S = local_ids(ids_ptr, expert_map_ptr, pair, pair < K, E, N_MAP)
        h_S = ((first + s // C) * I + s % C * (L * COLUMNS_OF_STEP)) // EACH
        # Of experts that are elsewhere h, and so its scale, is what memory held: it may be NaN.
        here_S = gl.convert_layout(e_S < E, s_t.type.layout)
        t_S = gl.where(here_S, (first + s_t // C) * GROUPS + s_t % C * part_groups(I, C, W), -1)
        h_SN = h_ptr + h_S[:, None] + 0 * n[None, :]
        tokens = (h_SN, h_scale_ptr, t_S[:, None] + 0 * n_t[None, :])
        if by_row(W) and EACH == 1:  # weights multiply the scales of choices
            weight_at = gl.where(here_S, first + s_t // C, -1)[:, None]
            tokens = (h_SN, weights_ptr, weight_at, (h_ptr, (first + s // C) * I))
        part = product_of(
            w_ptr, w_scale_ptr, w_zero_ptr, gl.where(e_S < E, e_S, -1), d, tokens, D, I, C, W,
            DTYPE, P, SIZES, True, PDL and narrow_ptr is None and round == 0,
        )  # fmt: skip
        if ORDERED:
            part = rescaled(part, W, DTYPE)
        if global_scale_ptr is not None:
            global_scale_S = gl.load(global_scale_ptr + e_S, mask=e_S < E, other=0.0)
            part *= gl.convert_layout(global_scale_S, along(unit_layout(SIZES), 0))[:, None, None]
        if ORDERED:
            rows = shares_of(part, SIZES)
            for share in gl.static_range(S):
                if first + share < K:
                    total = add_choice(
                        total, rows[share], first + share, ids_ptr, weights_ptr, expert_map_ptr,
                        bias_ptr, N_MAP, stride_be, E, D, out_ptr.dtype.element_ty,
                    )  # fmt: skip
        else:
            acc += part
    if not ORDERED:
        total = summed(acc, W, DTYPE)
        first_N = gl.arange(0, N, gl.SliceLayout(0, total.type.layout)) == 0
        total = gl.sum(gl.where(first_N[None, :], total, 0.0), 1)
    if narrow_ptr is not None:
        take_turn(PDL)
        of_adapter = (narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br)
        total = add_to_one(
            total, gl.program_id(0) * M, ids_ptr, expert_map_ptr, N_MAP, of_adapter, E, K, D,
            ADAPTERS, RANK, TR,
        )  # fmt: skip
    d = gl.program_id(0) * M + gl.arange(0, M, total.type.layout)
    if bias_ptr is not None and not ORDERED:
        for pair in range(K):
            e = local_ids(ids_ptr, expert_map_ptr, pair, True, E, N_MAP)
            weight = gl.load(weights_ptr + pair, mask=e < E, other=0.0).to(gl.float32)
            bias_at = bias_ptr + e.to(gl.int64) * stride_be + d
            bias = gl.load(bias_at, mask=(d < D) & (e < E), other=0.0)
            total += weight * bias.to(gl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + d, mask=d < D, other=0.0)
        out = (out.to(gl.float32) + residual.to(gl.float32)).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + d, out, mask=d < D)


@gluon.jit
def counted(BE: gl.constexpr):
    """0 to BE - 1, in every warp, so that none waits for another to count them."""
    EACH: gl.constexpr = max(1, BE // 32)
    return gl.arange(0, BE, gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))


@gluon.jit
def token_of(rows_ptr, first, n, K: gl.constexpr):
    """The tokens of rows first + n: of their pairs, or themselves where rows are not sorted."""
    if rows_ptr is None:
        return first + n
    else:
        return gl.load(rows_ptr + first + n) // K


@gluon.jit
def few_up(
    x_ptr, x_scale_ptr, rows_ptr, ends_ptr, slots, weights_ptr, w_ptr, w_scale_ptr, w_zero_ptr,
    global_scale_ptr, bias_ptr, h_ptr, stride_x, stride_be, narrow_ptr, wide_ptr, index_ptr,
    stride_bg, stride_bf, stride_br,
    E: gl.constexpr, K: gl.constexpr, D: gl.constexpr, I: gl.constexpr, ACT: gl.constexpr,
    W: gl.constexpr, SHARED: gl.constexpr, DTYPE: gl.constexpr, ADAPTERS: gl.constexpr,
    RANK: gl.constexpr, TR: gl.constexpr, BE: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr,
    LOOPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: a unit of work; of more units than programs, every so many, if it LOOPS."""
    M: gl.constexpr = 16 * SIZES.MW * SIZES.MT
    N: gl.constexpr = 8 * SIZES.NT
    blocks: gl.constexpr = ((2 * I if ACT.gated else I) + M - 1) // M
    tokens = (x_ptr, x_scale_ptr, rows_ptr, weights_ptr, stride_x)
    layer = (w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr, stride_be)
    of_adapter = (narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br)
    if narrow_ptr is None:
        take_turn(PDL)
    unit = gl.program_id(0)
    e, block, first, count = unit_of(ends_ptr, unit, blocks, counted(BE), E, N, slots)
    if LOOPS:
        while e < E:
            up_of_unit(
                e, block, first, count, tokens, layer, of_adapter, h_ptr, E, K, D, I, ACT, W,
                SHARED, DTYPE, ADAPTERS, RANK, TR, P, SIZES, PDL,
            )  # fmt: skip
            unit += gl.num_programs(0)
            e, block, first, count = unit_of(ends_ptr, unit, blocks, counted(BE), E, N, slots)
    else:
        if e >= E:
            if narrow_ptr is not None:
                take_turn(PDL)
            return
        up_of_unit(
            e, block, first, count, tokens, layer, of_adapter, h_ptr, E, K, D, I, ACT, W, SHARED,
            DTYPE, ADAPTERS, RANK, TR, P, SIZES, PDL,
        )  # fmt: skip


@gluon.jit
def up_of_unit(
    e, block, first, count, tokens, layer, of_adapter, h_ptr,
    E: gl.constexpr, K: gl.constexpr, D: gl.constexpr, I: gl.constexpr, ACT: gl.constexpr,
    W: gl.constexpr, SHARED: gl.constexpr, DTYPE: gl.constexpr, ADAPTERS: gl.constexpr,
    RANK: gl.constexpr, TR: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Some columns of h for some rows of one expert."""
    x_ptr, x_scale_ptr, rows_ptr, weights_ptr, stride_x = tokens
    w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr, stride_be = layer
    S: gl.constexpr = SIZES.S
    M: gl.constexpr = 16 * SIZES.MW * SIZES.MT
    N: gl.constexpr = 8 * SIZES.NT
    ROWS: gl.constexpr = 2 * I if ACT.gated else I
    EACH: gl.constexpr = 4 if x_ptr.dtype.element_ty == gl.int32 else 1
    L: gl.constexpr = steps_of(D, S)
    GROUPS: gl.constexpr = token_groups(D, W)
    words: gl.constexpr = words_layout(SIZES, W.bits)
    row_M = up_rows(block, M, I, ACT, along(words, 1))
    s, n, s_t, n_t = token_vectors(SIZES, W, EACH)
    # Of rows past the last one anything: columns of a product do not mix.
    token_N = token_of(rows_ptr, first, gl.minimum(n, count - 1), K)
    x_N = x_ptr + token_N.to(gl.int64) * stride_x
    x_SN = x_N[None, :] + (s * (L * COLUMNS_OF_STEP // EACH))[:, None]
    token_t = token_of(rows_ptr, first, gl.minimum(n_t, count - 1), K)
    t_SN = (token_t * GROUPS)[None, :] + (s_t * part_groups(D, S, W))[:, None]
    tokens = (x_SN, x_scale_ptr, t_SN)
    e_S = e + 0 * gl.arange(0, S, along(words, 0))
    bias_M = biases_at(bias_ptr, e.to(gl.int64) * stride_be, row_M)
    acc = product_of(
        w_ptr, w_scale_ptr, w_zero_ptr, e_S, row_M, tokens, ROWS, D, S, W, DTYPE, P, SIZES, False,
        False,
    )  # fmt: skip
    acc = under_globals(summed(acc, W, DTYPE), global_scale_ptr, e, row_M, ROWS, SHARED)
    if of_adapter[0] is not None:
        take_turn(PDL)
        acc = add_adapter(
            acc, e, row_M, first, count, first, of_adapter, E, ADAPTERS, RANK, TR, SIZES
        )
    acc = add_bias(acc, bias_M)
    h = activated(acc, ACT)
    n = gl.arange(0, N, gl.SliceLayout(0, h.type.layout))
    if weights_ptr is not None and not by_row(W):
        pair = gl.load(rows_ptr + first + n, mask=n < count, other=0)
        weight = gl.load(weights_ptr + pair, mask=n < count, other=0.0).to(gl.float32)
        h *= weight[None, :]
    store_h(h_ptr, h, first + n, n < count, block, I)


@gluon.jit
def few_down(
    h_ptr, h_scale_ptr, rows_ptr, ends_ptr, slots, weights_ptr, w_ptr, w_scale_ptr, w_zero_ptr,
    global_scale_ptr, bias_ptr, y_ptr, stride_be, narrow_ptr, wide_ptr, index_ptr, stride_bg,
    stride_bf, stride_br,
    E: gl.constexpr, D: gl.constexpr, I: gl.constexpr, W: gl.constexpr, DTYPE: gl.constexpr,
    ADAPTERS: gl.constexpr, RANK: gl.constexpr, TR: gl.constexpr, BE: gl.constexpr,
    P: gl.constexpr, SIZES: gl.constexpr, LOOPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: a unit of work; of more units than programs, every so many, if it LOOPS."""
    M: gl.constexpr = 16 * SIZES.MW * SIZES.MT
    N: gl.constexpr = 8 * SIZES.NT
    blocks: gl.constexpr = (D + M - 1) // M
    rows = (h_ptr, h_scale_ptr, rows_ptr, weights_ptr)
    layer = (w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr, stride_be)
    of_adapter = (narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br)
    # Who sorted the rows, or counted them, ended two launches ago.
    unit = gl.program_id(0)
    e, block, first, count = unit_of(ends_ptr, unit, blocks, counted(BE), E, N, slots)
    if LOOPS:
        while e < E:
            down_of_unit(
                e, block, first, count, rows, layer, of_adapter, y_ptr, E, D, I, W, DTYPE, ADAPTERS,
                RANK, TR, P, SIZES, PDL,
            )  # fmt: skip
            unit += gl.num_programs(0)
            e, block, first, count = unit_of(ends_ptr, unit, blocks, counted(BE), E, N, slots)
        take_turn(PDL)  # of programs without a unit, too
    else:
        if e >= E:
            take_turn(PDL)
            return
        down_of_unit(
            e, block, first, count, rows, layer, of_adapter, y_ptr, E, D, I, W, DTYPE, ADAPTERS,
            RANK, TR, P, SIZES, PDL,
        )  # fmt: skip


@gluon.jit
def down_of_unit(
    e, block, first, count, rows, layer, of_adapter, y_ptr,
    E: gl.constexpr, D: gl.constexpr, I: gl.constexpr, W: gl.constexpr, DTYPE: gl.constexpr,
    ADAPTERS: gl.constexpr, RANK: gl.constexpr, TR: gl.constexpr, P: gl.constexpr,
    SIZES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Some columns of y for some rows of one expert."""
    h_ptr, h_scale_ptr, rows_ptr, weights_ptr = rows
    w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr, stride_be = layer
    S: gl.constexpr = SIZES.S
    M: gl.constexpr = 16 * SIZES.MW * SIZES.MT
    N: gl.constexpr = 8 * SIZES.NT
    EACH: gl.constexpr = 4 if h_ptr.dtype.element_ty == gl.int32 else 1
    L: gl.constexpr = steps_of(I, S)
    GROUPS: gl.constexpr = token_groups(I, W)
    words: gl.constexpr = words_layout(SIZES, W.bits)
    d = gl.minimum(block * M + gl.arange(0, M, along(words, 1)), D - 1)
    s, n, s_t, n_t = token_vectors(SIZES, W, EACH)
    h_N = h_ptr + (first + gl.minimum(n, count - 1)).to(gl.int64) * (I // EACH)
    h_SN = h_N[None, :] + (s * (L * COLUMNS_OF_STEP // EACH))[:, None]
    row_t = first + gl.minimum(n_t, count - 1)
    tokens = (h_SN, h_scale_ptr, (row_t * GROUPS)[None, :] + (s_t * part_groups(I, S, W))[:, None])
    e_S = e + 0 * gl.arange(0, S, along(words, 0))
    acc = product_of(
        w_ptr, w_scale_ptr, w_zero_ptr, e_S, d, tokens, D, I, S, W, DTYPE, P, SIZES, False,
        PDL and of_adapter[0] is None,
    )  # fmt: skip
    acc = under_global(summed(acc, W, DTYPE), global_scale_ptr, e)
    if of_adapter[0] is not None:
        take_turn(PDL)
        acc = add_adapter(acc, e, d, first, count, first, of_adapter, E, ADAPTERS, RANK, TR, SIZES)
    layout: gl.constexpr = acc.type.layout
    n = gl.arange(0, N, gl.SliceLayout(0, layout))
    d = block * M + gl.arange(0, M, gl.SliceLayout(1, layout))
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + e.to(gl.int64) * stride_be + d, mask=d < D, other=0.0)
        if weights_ptr is None:
            acc += bias.to(gl.float32)[:, None]
        else:
            pair = gl.load(rows_ptr + first + n, mask=n < count, other=0)
            weight = gl.load(weights_ptr + pair, mask=n < count, other=0.0).to(gl.float32)
            acc += bias.to(gl.float32)[:, None] * weight[None, :]
    at = (first + n).to(gl.int64)[None, :] * D + d[:, None]
    mask = (d < D)[:, None] & (n < count)[None, :]
    gl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=mask)
