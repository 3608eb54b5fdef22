"""The experts for a few tokens in two launches: every weight is read once, at the rate of memory.
Tokens for quantised weights, and h for those with inputs of 8 bits, take one more launch each, or
two to find one scale for all of them; h with a static scale takes none.

All tokens are one operand of every product, whichever experts they chose: a decoding step waits
for weights, so that products with tokens of other experts cost nothing and nothing is sorted or
gathered. Weights are the rows of the matrix units' tiles, tokens their columns. An infinite weight
makes NaN of all tokens, also of those that did not choose its expert.

    tiny_up    h[p, t] = weight[t, e] * activate(W13[e] x_t + b13[e]) for the pair p of token and
               choice that is the first to name the expert e; 0 where token t did not choose it
    tiny_down  out[t] = sum over the experts in use of W2[e] h[p, t] + weight[t, e] * b2[e],
               rounded; plus residual[t] if there is one, rounded again

A program of tiny_up reads the id of its own pair and whether one before it is the same: no more, as
all of them wait for it. Which experts are in use, without gaps, one more program works out beside
the others, and tiny_down finds it in a table: their number, then their ids (E: none), then their
pairs. Of one token every choice counts as an expert in use, so that there is no table and tiny_down
knows them ahead of the end of tiny_up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton import TINY_TOKENS
from moe_ops.kernels.triton.experts.adapters import add_adapter
from moe_ops.kernels.triton.experts.call import Call, Reads
from moe_ops.kernels.triton.experts.driver import Products
from moe_ops.kernels.triton.experts.formats.codes import by_row
from moe_ops.kernels.triton.experts.formats.order import column_of
from moe_ops.kernels.triton.experts.formats.scales import rescaled, under_globals
from moe_ops.kernels.triton.experts.operands.row_scales import by_expert, codes_of_h
from moe_ops.kernels.triton.experts.products.block_steps import add_product
from moe_ops.kernels.triton.experts.schedule.combine import onto
from moe_ops.kernels.triton.experts.schedule.sort import local_ids
from moe_ops.kernels.triton.experts.weights import activated, rows_at, strides, up_rows
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

# Bytes of a row that a program prefetches, and of a line of the cache. With it one token in float8
# took 0.3 to 1.0 µs less on an H200 in five of six layers, of 19.5 to 96, and 0.6 more in one.
PREFETCHED, LINE = tl.constexpr(1024), tl.constexpr(128)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyTiles:
    """The tiles of two launches. The first takes BI columns of h, and BD columns of x a step. The
    second takes BG experts and BR rows, and BH columns of h a step."""

    BI: int = 32
    BD: int = 128
    up_stages: int = 4
    BG: int = 8
    BR: int = 8
    BH: int = 128
    down_stages: int = 4


@triton.jit
def experts_in_use(ids_ptr, expert_map_ptr, P, E: tl.constexpr, N_MAP, BP: tl.constexpr):
    """(ids, ranks, count): the expert of each pair, how many of those in use have a smaller id, and
    how many are in use. A pair that repeats an expert, or has none, has the rank BP.

    Ranks go by ids and not by who comes first: the order of sums is then the same for a token
    whatever the order of the other tokens is.
    """
    p = tl.arange(0, BP)
    ids_P = local_ids(ids_ptr, expert_map_ptr, p, p < P, E, N_MAP)
    # The same vector along the other axis: loaded, which is quicker than moved across threads.
    ids_Q = local_ids(ids_ptr, expert_map_ptr, p, p < P, E, N_MAP)
    repeats_PQ = (ids_P[:, None] == ids_Q[None, :]) & (p[None, :] < p[:, None])
    first_P = (ids_P < E) & (tl.max(repeats_PQ.to(tl.int32), 1) == 0)
    repeated_PQ = (ids_P[:, None] == ids_Q[None, :]) & (p[:, None] < p[None, :])
    first_Q = (ids_Q < E) & (tl.max(repeated_PQ.to(tl.int32), 0) == 0)
    smaller_PQ = (ids_Q[None, :] < ids_P[:, None]) & first_Q[None, :]
    ranks_P = tl.sum(smaller_PQ.to(tl.int32), 1)
    return ids_P, tl.where(first_P, ranks_P, BP), tl.sum(first_P.to(tl.int32), 0)


@triton.jit
def write_table(ids_ptr, expert_map_ptr, table_ptr, P, E: tl.constexpr, N_MAP, BP: tl.constexpr):
    """The table of experts in use, see the module."""
    p = tl.arange(0, BP)
    ids_P, ranks_P, count = experts_in_use(ids_ptr, expert_map_ptr, P, E, N_MAP, BP)
    here_RP = ranks_P[None, :] == p[:, None]
    ids_R = tl.sum(tl.where(here_RP, ids_P[None, :], 0), 1)
    tl.store(table_ptr, count)
    tl.store(table_ptr + 1 + p, tl.where(p < count, ids_R, E))
    tl.store(table_ptr + 1 + BP + p, tl.sum(tl.where(here_RP, p[None, :], 0), 1))


# One compiled kernel serves every number of tokens.
@triton.jit(do_not_specialize=["T", "N_MAP"])
def tiny_up(
    x_ptr, x_scale_ptr, ids_ptr, weights_ptr, expert_map_ptr, w_ptr, w_scale_ptr, w_zero_ptr,
    global_scale_ptr, bias_ptr, h_scale_ptr, h_ptr, h_row_scale_ptr, table_ptr, share_ptr, T, N_MAP,
    stride_x, stride_we, stride_wf, stride_wd, stride_be, narrow_ptr, wide_ptr, index_ptr,
    stride_bg, stride_bf, stride_br,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, I: tl.constexpr, H: tl.constexpr,
    ACT: tl.constexpr, W: tl.constexpr, SHARED: tl.constexpr, EACH: tl.constexpr,
    DTYPE: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, TR: tl.constexpr,
    BP: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr,
    CHAIN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BI columns of h for the expert of one pair; of several tokens, the last one
    writes the table. CHAIN is as in `add_product`; AHEAD says whether who chose the experts ended
    two launches ago, so that weights are prefetched.

    share[p, t] is weight[t, e], for tiny_down to weigh biases with, or for h to be weighed with
    that is quantised by rows. EACH and DTYPE are as those of `rows_up`.
    """
    GATED: tl.constexpr = ACT.gated
    BF: tl.constexpr = 2 * BI if GATED else BI
    blocks: tl.constexpr = (H + BI - 1) // BI
    pair = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if AHEAD:
        e = local_ids(ids_ptr, expert_map_ptr, pair, pair < T * K, E, N_MAP)
        row_F, inside_F = up_rows(block, I, BI, ACT)
        prefetch_rows(w_ptr, e, row_F, inside_F & (e < E), stride_we, stride_wf, D)
    if narrow_ptr is None or not ONE:
        take_turn(PDL)
    if not ONE:  # noqa: SIM102  (known when this is compiled, what follows is not)
        if pair == T * K:
            write_table(ids_ptr, expert_map_ptr, table_ptr, T * K, E, N_MAP, BP)
            return
    e = local_ids(ids_ptr, expert_map_ptr, pair, pair < T * K, E, N_MAP)
    if e >= E:
        if narrow_ptr is not None and ONE:
            take_turn(PDL)
        return
    n = tl.arange(0, BN)
    p = tl.arange(0, BP)
    if ONE:
        chosen_N = n < 1
        if weights_ptr is not None:
            weight_N = tl.load(weights_ptr + pair + n, mask=chosen_N, other=0.0).to(tl.float32)
    else:
        ids_P = local_ids(ids_ptr, expert_map_ptr, p, p < T * K, E, N_MAP)
        if tl.max(((ids_P == e) & (p < pair)).to(tl.int32), 0) > 0:
            return
        weights_P = tl.load(weights_ptr + p, mask=p < T * K, other=0.0).to(tl.float32)
        chosen_PN = (ids_P == e)[:, None] & (p[:, None] // K == n[None, :])
        weight_N = tl.sum(tl.where(chosen_PN, weights_P[:, None], 0.0), 0)
        chosen_N = tl.max(chosen_PN.to(tl.int32), 0) > 0

    row_F, inside_F = up_rows(block, I, BI, ACT)
    e = e.to(tl.int64)
    ROWS: tl.constexpr = 2 * I if GATED else I
    w_F1 = rows_at(w_ptr, e, row_F, stride_we, stride_wf, ROWS, D, W)
    x_1N = (x_ptr + n.to(tl.int64) * stride_x)[None, :]
    acc_FN = tl.zeros((BF, BN), tl.float32)
    acc_FN = add_product(
        acc_FN, w_F1, stride_wd, w_scale_ptr, w_zero_ptr, e, row_F, inside_F, x_1N, x_scale_ptr, n,
        n < T, ROWS, D, BD, W, "evict_first", CHAIN,
    )  # fmt: skip
    acc_FN = under_globals(
        rescaled(acc_FN, W, x_ptr.dtype.element_ty), global_scale_ptr, e, row_F, inside_F, ROWS,
        SHARED,
    )  # fmt: skip
    if narrow_ptr is not None:
        if ONE:
            take_turn(PDL)  # what is added is made by the launch before, and nothing else
        acc_FN = add_adapter(
            acc_FN, e, row_F, inside_F, pair * T + n, n, n < T, narrow_ptr, wide_ptr, index_ptr,
            stride_bg, stride_bf, stride_br, E, ADAPTERS, RANK, TR, False,
        )  # fmt: skip
    if share_ptr is not None:
        # One of the pair's programs is enough.
        tl.store(share_ptr + pair * T + n, weight_N, mask=n < tl.where(block == 0, T, 0))
    h_IN = activated(acc_FN, bias_ptr, e * stride_be, row_F, inside_F, BI, BN, ACT)
    if by_row(W):
        h_IN = tl.where(chosen_N[None, :], h_IN, 0.0)
        if h_scale_ptr is not None:
            h_IN, scale = codes_of_h(h_IN, h_scale_ptr, e, EACH, DTYPE, W.element == "int8")
            mine_N = n < tl.where(block == 0, T, 0)  # one of the pair's programs is enough
            tl.store(h_row_scale_ptr + pair * T + n, scale * weight_N, mask=mine_N)
    else:
        if weights_ptr is not None:
            h_IN = h_IN * weight_N[None, :]
        h_IN = tl.where(chosen_N[None, :], h_IN, 0.0)
    i = block * BI + tl.arange(0, BI)
    if H > I:
        h_IN = tl.where((i < I)[:, None], h_IN, 0.0)
    at_IN = h_ptr + (pair * T + n).to(tl.int64)[None, :] * H + column_of(i, W)[:, None]
    mask_IN = (i < H)[:, None] & (n < T)[None, :]
    tl.store(at_IN, h_IN.to(h_ptr.dtype.element_ty), mask=mask_IN)


@triton.jit
def prefetch_rows(
    w_ptr, e, row_M, inside_M, stride_e, stride_row, COLUMNS: tl.constexpr
):  # fmt: skip
    """The first PREFETCHED bytes of rows of weights of 8 bits into the L2 cache, while the launch
    before ends; of rows that are not inside, those of the first one."""
    byte_B = tl.minimum(tl.arange(0, PREFETCHED // LINE) * LINE, COLUMNS - 1)
    row_M = tl.where(inside_M, e.to(tl.int64) * stride_e + row_M * stride_row, 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [w_ptr + row_M[:, None] + byte_B],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def id_of(
    rank, ids_ptr, expert_map_ptr, table_ptr, N_MAP,
    E: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """The ids of experts in use; E in places that are left over."""
    if ONE:
        ids = local_ids(ids_ptr, expert_map_ptr, rank, rank < K, E, N_MAP)
    else:
        ids = tl.load(table_ptr + 1 + rank, mask=rank < BP, other=E)
    return ids


@triton.jit
def pair_of(rank, table_ptr, BP: tl.constexpr, ONE: tl.constexpr):
    """The pairs that were the first to name experts in use."""
    return rank if ONE else tl.load(table_ptr + 1 + BP + rank, mask=rank < BP, other=0)


@triton.jit
def add_choices(
    total_R, sum_MN, first, e_M, d_M, inside_M, ids_ptr, expert_map_ptr, weights_ptr, bias_ptr,
    N_MAP, stride_be, E: tl.constexpr, K: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """total and, in their order, BG choices of one token from the first on, once rounded, times
    their weights. Column n of the sums is that of choice first + n."""
    n = tl.arange(0, sum_MN.shape[1])
    mine_MN = (tl.arange(0, BG * BR) // BR)[:, None] == n[None, :]
    y_M = tl.sum(tl.where(mine_MN, sum_MN, 0.0), 1)
    if bias_ptr is not None:
        bias_at = bias_ptr + e_M.to(tl.int64) * stride_be + d_M
        y_M += tl.load(bias_at, mask=inside_M, other=0.0).to(tl.float32)
    y_GR = tl.reshape(y_M.to(DTYPE).to(tl.float32), (BG, BR))
    for g in tl.static_range(BG):
        y_R = tl.sum(tl.where((tl.arange(0, BG) == g)[:, None], y_GR, 0.0), 0)
        pair_R = first + g + tl.zeros((BR,), tl.int32)
        e_R = local_ids(ids_ptr, expert_map_ptr, pair_R, pair_R < K, E, N_MAP)
        weight_R = tl.load(weights_ptr + pair_R, mask=e_R < E, other=0.0).to(tl.float32)
        total_R = tl.fma(y_R, weight_R, total_R)
    return total_R


# One compiled kernel serves every number of tokens.
@triton.jit(do_not_specialize=["T", "N_MAP"])
def tiny_down(
    h_ptr, h_scale_ptr, ids_ptr, expert_map_ptr, table_ptr, share_ptr, w_ptr, w_scale_ptr,
    w_zero_ptr, global_scale_ptr, bias_ptr, residual_ptr, out_ptr, T, N_MAP, stride_we, stride_wd,
    stride_wi, stride_be, narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, I: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, TR: tl.constexpr, BP: tl.constexpr,
    BT: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr, BN: tl.constexpr,
    ONE: tl.constexpr, ORDERED: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BR columns of out for all tokens, BG experts at a time.

    A tile of weights holds BR rows of each of BG experts; its product with the h of the same
    experts has BG * BG blocks, of which the diagonal counts. ORDERED, for one token: each choice is
    rounded as a row of `rows_down` is, and added as the sum of rows does, by share, its weights.
    """
    m = tl.arange(0, BG * BR)
    n = tl.arange(0, BN)
    if ONE:  # who chose the experts ended two launches ago
        e_M = id_of(m // BR, ids_ptr, expert_map_ptr, table_ptr, N_MAP, E, K, BP, ONE)
        e_N = id_of(n // BT, ids_ptr, expert_map_ptr, table_ptr, N_MAP, E, K, BP, ONE)
        pair_N = pair_of(n // BT, table_ptr, BP, ONE)
    if AHEAD:
        d_M = tl.program_id(0) * BR + m % BR
        prefetch_rows(w_ptr, e_M, d_M, (d_M < D) & (e_M < E), stride_we, stride_wd, I)
    if narrow_ptr is None or not ONE:
        take_turn(PDL)
    rows_T = tl.arange(0, BT)
    d_R = tl.program_id(0) * BR + tl.arange(0, BR)
    at_RT = rows_T[None, :] * D + d_R[:, None]
    mine_RT = (d_R < D)[:, None] & (rows_T < T)[None, :]
    if residual_ptr is not None:  # asked for here, so that nothing waits for it at the end
        residual_RT = tl.load(residual_ptr + at_RT, mask=mine_RT, other=0.0)
    if ONE:
        count = K
    else:
        count = tl.load(table_ptr)
        e_M = id_of(m // BR, ids_ptr, expert_map_ptr, table_ptr, N_MAP, E, K, BP, ONE)
        e_N = id_of(n // BT, ids_ptr, expert_map_ptr, table_ptr, N_MAP, E, K, BP, ONE)
        pair_N = pair_of(n // BT, table_ptr, BP, ONE)
    d_M = tl.program_id(0) * BR + m % BR
    token_N = n % BT
    acc_MN = tl.zeros((BG * BR, BN), tl.float32)
    added_MN = acc_MN  # apart, as sums with weights are rescaled
    total_R = tl.zeros((BR,), tl.float32)
    for first in range(0, count, BG):
        inside_M = (d_M < D) & (e_M < E)
        inside_N = (token_N < T) & (e_N < E) & (n // BT < BG)
        w_M1 = rows_at(w_ptr, e_M, d_M, stride_we, stride_wd, D, I, W)
        h_1N = (h_ptr + (pair_N * T + token_N).to(tl.int64) * H)[None, :]
        # Each round has other experts, and so other global scales.
        APART: tl.constexpr = ORDERED or global_scale_ptr is not None
        sum_MN = tl.zeros((BG * BR, BN), tl.float32) if APART else acc_MN
        sum_MN = add_product(
            sum_MN, w_M1, stride_wi, w_scale_ptr, w_zero_ptr, e_M, d_M, inside_M, h_1N, h_scale_ptr,
            pair_N * T + token_N, inside_N, D, I, BI, W, "evict_first", ORDERED,
        )  # fmt: skip
        if ORDERED:
            total_R = add_choices(
                total_R, sum_MN, first, e_M, d_M, inside_M, ids_ptr, expert_map_ptr, share_ptr,
                bias_ptr, N_MAP, stride_be, E, K, BG, BR, out_ptr.dtype.element_ty,
            )  # fmt: skip
        elif global_scale_ptr is not None:
            acc_MN += sum_MN * tl.load(global_scale_ptr + e_M, mask=e_M < E, other=0.0)[:, None]
        else:
            acc_MN = sum_MN
        if narrow_ptr is not None:
            if ONE:
                take_turn(PDL)
            added_MN = add_adapter(
                added_MN, e_M, d_M, inside_M, pair_N * T + token_N, token_N, inside_N, narrow_ptr,
                wide_ptr, index_ptr, stride_bg, stride_bf, stride_br, E, ADAPTERS, RANK, TR, False,
            )  # fmt: skip
        next_M, next_N = first + BG + m // BR, first + BG + n // BT
        e_M = id_of(next_M, ids_ptr, expert_map_ptr, table_ptr, N_MAP, E, K, BP, ONE)
        e_N = id_of(next_N, ids_ptr, expert_map_ptr, table_ptr, N_MAP, E, K, BP, ONE)
        pair_N = pair_of(next_N, table_ptr, BP, ONE)
    acc_MN = rescaled(acc_MN, W, h_ptr.dtype.element_ty)
    if narrow_ptr is not None:
        acc_MN += added_MN
    diagonal_MN = (m // BR)[:, None] == (n // BT)[None, :]
    acc_MN = tl.where(diagonal_MN, acc_MN, 0.0)
    out_MT = tl.sum(tl.reshape(acc_MN, (BG * BR, BN // BT, BT)), 1)
    out_RT = tl.sum(tl.reshape(out_MT, (BG, BR, BT)), 0)
    if ORDERED:
        out_RT = total_R[:, None]
    if bias_ptr is not None and not ORDERED:
        for rank in range(count):
            # Loaded as vectors, which the masks are.
            rank_R, rank_T = rank + 0 * d_R, rank + 0 * rows_T
            e_R = id_of(rank_R, ids_ptr, expert_map_ptr, table_ptr, N_MAP, E, K, BP, ONE)
            e_T = id_of(rank_T, ids_ptr, expert_map_ptr, table_ptr, N_MAP, E, K, BP, ONE)
            pair_T = pair_of(rank_T, table_ptr, BP, ONE)
            here_R, here_T = (d_R < D) & (e_R < E), (rows_T < T) & (e_T < E)
            bias_R = tl.load(bias_ptr + e_R.to(tl.int64) * stride_be + d_R, mask=here_R, other=0.0)
            share_T = tl.load(share_ptr + pair_T * T + rows_T, mask=here_T, other=0.0)
            bias_RT = bias_R.to(tl.float32)[:, None] * share_T[None, :]
            out_RT += tl.where((share_T != 0)[None, :], bias_RT, 0.0)
    out_RT = out_RT.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        out_RT = onto(out_RT, residual_RT)
    tl.store(out_ptr + at_RT, out_RT, mask=mine_RT)


def _prefetches(c: Call) -> tuple[bool, bool]:
    """Whether each launch prefetches weights: of one token that is rounded to codes, the first one
    where a launch ahead of it does so."""
    codes, PDL = c.codes, pdl_options(c.ids_TK)["PDL"]
    if codes is None or not codes.quantizes or len(c.ids_TK) > 1 or not PDL:
        return False, False
    return codes.x_scale_TG is None, True


def _up(c: Call) -> None:
    (T, K), (E, D, I), layer, static = c.ids_TK.shape, c.sizes, c.layer, c.static
    P, H, weights, w13 = T * K, c.h.values.shape[1], c.weights, layer.stack13
    BP = triton.next_power_of_2(P)
    c.table = None if T == 1 else c.ids_TK.new_empty(1 + 2 * BP, dtype=torch.int32)
    # Weights of each token and each expert in use: of biases, and of h that is quantised by rows.
    later = layer.codes is not None and layer.codes.by_row and static is None
    shares = not c.invariant and (layer.b2_ED is not None or later)
    c.weights = c.ids_TK.new_empty(P, T, dtype=torch.float32) if shares else None
    launch(
        tiny_up, (P * triton.cdiv(H, c.tiles.BI) + (T > 1),),
        c.x.values, c.x.scale, c.ids_TK, weights, c.expert_map, *w13, static, c.h.values,
        c.h.scale, c.table, c.weights, T, c.n_map, c.x.values.stride(0), *strides(w13),
        *c.added13.arguments,
        E=E, K=K, D=D, I=I, H=H, ACT=layer.act, W=layer.weight, SHARED=layer.shared13,
        EACH=by_expert(static), DTYPE=c.rounded, **c.added13.constants, BP=BP,
        BI=c.tiles.BI, BD=c.tiles.BD, BN=TINY_TOKENS, ONE=T == 1,
        CHAIN=c.invariant, AHEAD=_prefetches(c)[0],
        num_warps=4, num_stages=c.tiles.up_stages, **pdl_options(c.ids_TK),
    )  # fmt: skip


def _down(c: Call) -> None:
    (T, K), (E, D, I), w2, tiles = c.ids_TK.shape, c.sizes, c.layer.stack2, c.tiles
    BT = triton.next_power_of_2(T)
    launch(
        tiny_down, (triton.cdiv(D, tiles.BR),),
        c.h.values, c.h.scale, c.ids_TK, c.expert_map, c.table,
        c.summed if c.invariant else c.weights, *w2,
        c.residual_TD, c.out, T, c.n_map, *strides(w2), *c.added2.arguments,
        E=E, K=K, D=D, I=I, H=c.h.values.shape[1], W=c.layer.weight, **c.added2.constants,
        BP=triton.next_power_of_2(T * K), BT=BT, BG=tiles.BG, BR=tiles.BR, BI=tiles.BH,
        BN=max(16, tiles.BG * BT), ONE=T == 1, ORDERED=c.invariant, AHEAD=_prefetches(c)[1],
        num_warps=4, num_stages=tiles.down_stages, **pdl_options(c.ids_TK),
    )  # fmt: skip


run = Products(
    up=_up, down=_down, reads=Reads(arranged=(4, 6), stores="static", weighs=True), sorts=False
).run
