"""The experts for a few tokens in two launches: every weight is read once, at the rate of memory.

All tokens are one operand of every product, whichever experts they chose: a decoding step waits
for weights, so that products with tokens of other experts cost nothing and nothing is sorted or
gathered. Weights are the rows of the matrix units' tiles, tokens their columns.

    tiny_up    h[rank, t] = weight[t, e] * activate(W13[e] x_t + b13[e]) for the rank-th expert in
               use, e; 0 where token t did not choose it
    tiny_down  out[t] = sum over ranks of W2[e] h[rank, t] + weight[t, e] * b2[e]

Each program finds the experts in use from the few (token, choice) pairs by itself; of ONE token
they are its choices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import TINY_PAIRS, TINY_TOKENS
from moe_ops.kernels.triton.launch import pdl_options, processors
from moe_ops.kernels.triton.sort import local_ids
from moe_ops.kernels.triton.weights import Experts, activated, bias_stride, up_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Of the two launches: columns of h and of x a step; experts, rows and columns of h a step."""

    BI: int = 32
    BD: int = 128
    up_stages: int = 4
    BG: int = 8
    BR: int = 8
    BH: int = 128
    down_stages: int = 4


def tiles_for(T: int, K: int, D: int, I: int, processors: int) -> Tiles:
    """The fastest on an H200 over six layers at 1, 2 and 4 tokens, or within 2 % of it."""
    if T > 1:
        small = Tiles(BD=64, up_stages=6)  # so that all blocks of small experts run at once
        if D * I <= 2**20:
            return replace(small, up_stages=4, BH=64, down_stages=6)
        return small if D * I < 2**23 else Tiles()

    # As many experts a tile as one token chooses, or twice as many (half of the tile is empty then)
    # if that spreads the blocks more evenly over the processors.
    def evenness(BG: int) -> float:
        return D * BG / 64 / processors / triton.cdiv(D * BG, 64 * processors)

    chosen = min(16, max(2, triton.next_power_of_2(K)))
    BG = max(chosen, min(16, 2 * chosen), key=evenness)
    tiles = Tiles(BG=BG, BR=64 // BG)
    return tiles if 2 * 64 * processors >= D * BG else replace(tiles, BH=64, down_stages=6)


@triton.jit
def experts_in_use(experts_ptr, map_ptr, P, E: tl.constexpr, N_MAP, BP: tl.constexpr):
    """(ids, ranks, count): the expert of each pair, how many distinct ones come before it, and how
    many there are. A pair that repeats an expert, or has none, has the rank BP.
    """
    p = tl.arange(0, BP)
    ids_P = local_ids(experts_ptr, map_ptr, p, p < P, E, N_MAP)
    # The same vector along the other axis: loaded, which is quicker than moved across threads.
    ids_Q = local_ids(experts_ptr, map_ptr, p, p < P, E, N_MAP)
    repeats_PQ = (ids_P[:, None] == ids_Q[None, :]) & (p[None, :] < p[:, None])
    first_P = (ids_P < E) & (tl.max(repeats_PQ.to(tl.int32), 1) == 0)
    ranks_P = tl.cumsum(first_P.to(tl.int32), 0) - 1
    return ids_P, tl.where(first_P, ranks_P, BP), tl.sum(first_P.to(tl.int32), 0)


# One compiled kernel serves every number of tokens.
@triton.jit(do_not_specialize=["T", "N_MAP"])
def tiny_up(
    x_ptr, experts_ptr, weights_ptr, map_ptr, w_ptr, b_ptr, h_ptr,
    T, N_MAP, stride_x, stride_we, stride_wf, stride_wd, stride_be,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, I: tl.constexpr, ACT: tl.constexpr,
    BP: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BI columns of h for one expert in use."""
    GATED: tl.constexpr = ACT[1]
    BF: tl.constexpr = 2 * BI if GATED else BI
    blocks: tl.constexpr = (I + BI - 1) // BI
    rank = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.arange(0, BN)
    if ONE:
        e = local_ids(experts_ptr, map_ptr, rank, rank < K, E, N_MAP)
        if e >= E:
            return
        chosen_N = n < 1
        weight_N = tl.load(weights_ptr + rank + n, mask=chosen_N, other=0.0).to(tl.float32)
    else:
        ids_P, ranks_P, count = experts_in_use(experts_ptr, map_ptr, T * K, E, N_MAP, BP)
        if rank >= count:
            return
        e = tl.sum(tl.where(ranks_P == rank, ids_P, 0), 0)
        p = tl.arange(0, BP)
        weights_P = tl.load(weights_ptr + p, mask=p < T * K, other=0.0).to(tl.float32)
        chosen_PN = (ids_P == e)[:, None] & (p[:, None] // K == n[None, :])
        weight_N = tl.sum(tl.where(chosen_PN, weights_P[:, None], 0.0), 0)
        chosen_N = tl.max(chosen_PN.to(tl.int32), 0) > 0

    row_F, inside_F = up_rows(block, I, BI, ACT)
    e = e.to(tl.int64)
    w_F1 = (w_ptr + e * stride_we + row_F.to(tl.int64) * stride_wf)[:, None]
    d = tl.arange(0, BD)
    x_1N = (x_ptr + n * stride_x)[None, :]
    acc_FN = tl.zeros((BF, BN), tl.float32)
    for start in range(0, D, BD):
        inside_D = start + d < D
        w_FD = tl.load(
            w_F1 + ((start + d) * stride_wd)[None, :],
            mask=inside_F[:, None] & inside_D[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        x_DN = tl.load(
            x_1N + (start + d)[:, None], mask=inside_D[:, None] & (n < T)[None, :], other=0.0
        )
        acc_FN = tl.dot(w_FD, x_DN, acc_FN)
    h_IN = activated(acc_FN, b_ptr, e * stride_be, row_F, inside_F, BI, BN, ACT)
    h_IN = tl.where(chosen_N[None, :], h_IN * weight_N[None, :], 0.0)
    i = block * BI + tl.arange(0, BI)
    tl.store(
        h_ptr + (rank * T + n).to(tl.int64)[None, :] * I + i[:, None],
        h_IN.to(h_ptr.dtype.element_ty),
        mask=(i < I)[:, None] & (n < T)[None, :],
    )


@triton.jit(do_not_specialize=["T", "N_MAP"])
def tiny_down(
    h_ptr, experts_ptr, weights_ptr, map_ptr, w_ptr, b_ptr, out_ptr,
    T, N_MAP, stride_we, stride_wd, stride_wi, stride_be,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, I: tl.constexpr,
    BP: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
    BN: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BR columns of out for all tokens, BG experts at a time.

    A tile of weights holds BR rows of each of BG experts; its product with the h of the same
    experts has BG * BG blocks, of which the diagonal counts.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if ONE:
        count = K
    else:
        ids_P, ranks_P, count = experts_in_use(experts_ptr, map_ptr, T * K, E, N_MAP, BP)
    g = tl.arange(0, BG)
    m = tl.arange(0, BG * BR)
    d = tl.program_id(0) * BR + m % BR
    n = tl.arange(0, BN)
    i = tl.arange(0, BI)
    token_N = n % BT
    acc_MN = tl.zeros((BG * BR, BN), tl.float32)
    for first in range(0, count, BG):
        rank_M = first + m // BR
        rank_N = first + n // BT
        if ONE:
            e_M = local_ids(experts_ptr, map_ptr, rank_M, rank_M < K, E, N_MAP)
            e_N = local_ids(experts_ptr, map_ptr, rank_N, rank_N < K, E, N_MAP)
            inside_M = (d < D) & (e_M < E)
            inside_N = (n < BG) & (e_N < E)
        else:
            mine_GP = ranks_P[None, :] == (first + g)[:, None]
            e_G = tl.sum(tl.where(mine_GP, ids_P[None, :], 0), 1)
            e_M = tl.reshape(tl.broadcast_to(e_G[:, None], (BG, BR)), (BG * BR,))
            inside_M = (d < D) & (rank_M < count)
            inside_N = (token_N < T) & (rank_N < count) & (n // BT < BG)
        e_M = e_M.to(tl.int64)
        w_M1 = (w_ptr + e_M * stride_we + d.to(tl.int64) * stride_wd)[:, None]
        h_1N = (h_ptr + (rank_N * T + token_N).to(tl.int64) * I)[None, :]
        for start in range(0, I, BI):
            inside_I = start + i < I
            w_MI = tl.load(
                w_M1 + ((start + i) * stride_wi)[None, :],
                mask=inside_M[:, None] & inside_I[None, :], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
            h_IN = tl.load(
                h_1N + (start + i)[:, None], mask=inside_I[:, None] & inside_N[None, :], other=0.0
            )
            acc_MN = tl.dot(w_MI, h_IN, acc_MN)
        if b_ptr is not None:
            b_M = tl.load(b_ptr + e_M * stride_be + d, mask=inside_M, other=0.0).to(tl.float32)
            if ONE:
                weight_M = tl.load(weights_ptr + rank_M, mask=inside_M, other=0.0)
                acc_MN += (b_M * weight_M.to(tl.float32))[:, None]
            else:
                p = tl.arange(0, BP)
                weights_P = tl.load(weights_ptr + p, mask=p < T * K, other=0.0).to(tl.float32)
                for t in range(T):
                    of_t_GP = (ids_P[None, :] == e_G[:, None]) & (p[None, :] // K == t)
                    weight_G = tl.sum(tl.where(of_t_GP, weights_P[None, :], 0.0), 1)
                    weight_M = tl.reshape(tl.broadcast_to(weight_G[:, None], (BG, BR)), (BG * BR,))
                    acc_MN += tl.where(token_N == t, (b_M * weight_M)[:, None], 0.0)
    diagonal_MN = (m // BR)[:, None] == (n // BT)[None, :]
    acc_MN = tl.where(diagonal_MN, acc_MN, 0.0)
    out_MT = tl.sum(tl.reshape(acc_MN, (BG * BR, BN // BT, BT)), 1)
    out_RT = tl.sum(tl.reshape(out_MT, (BG, BR, BT)), 0)
    rows_T = tl.arange(0, BT)
    d_R = tl.program_id(0) * BR + tl.arange(0, BR)
    tl.store(
        out_ptr + rows_T[None, :] * D + d_R[:, None],
        out_RT.to(out_ptr.dtype.element_ty),
        mask=(d_R < D)[:, None] & (rows_T < T)[None, :],
    )


def run(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    layer: Experts,
    expert_map: Tensor | None,
    tiles: Tiles | None = None,
) -> Tensor:
    """The `experts` op for up to TINY_TOKENS tokens and TINY_PAIRS pairs of token and choice."""
    (T, K), (E, D, I) = experts_TK.shape, layer.sizes
    if T > TINY_TOKENS or T * K > TINY_PAIRS:
        raise ValueError(
            f"takes {TINY_TOKENS} tokens and {TINY_PAIRS} pairs of token and choice at most, got "
            f"{T} tokens with {K} choices; run `rows`"
        )
    if tiles is None:
        tiles = tiles_for(T, K, D, I, processors(x_TD))
    n_map = 0 if expert_map is None else expert_map.shape[0]
    # Distinct experts in use; of one token its choices, some of which may lie elsewhere.
    h_RTI = x_TD.new_empty(K if T == 1 else min(T * K, E), T, I)
    out_TD = x_TD.new_empty(T, D)
    pdl, options = pdl_options(x_TD)
    BP, BT = triton.next_power_of_2(T * K), triton.next_power_of_2(T)
    tiny_up[(h_RTI.shape[0] * triton.cdiv(I, tiles.BI),)](
        x_TD, experts_TK, weights_TK, expert_map, layer.w13_EFD, layer.b13_EF, h_RTI,
        T, n_map, x_TD.stride(0), *layer.strides13, bias_stride(layer.b13_EF),
        E=E, K=K, D=D, I=I, ACT=layer.act, BP=BP, BI=tiles.BI, BD=tiles.BD, BN=TINY_TOKENS,
        ONE=T == 1, PDL=pdl, num_warps=4, num_stages=tiles.up_stages, **options,
    )  # fmt: skip
    tiny_down[(triton.cdiv(D, tiles.BR),)](
        h_RTI, experts_TK, weights_TK, expert_map, layer.w2_EDI, layer.b2_ED, out_TD,
        T, n_map, *layer.strides2, bias_stride(layer.b2_ED),
        E=E, K=K, D=D, I=I, BP=BP, BT=BT, BG=tiles.BG, BR=tiles.BR, BI=tiles.BH,
        BN=max(16, tiles.BG * BT), ONE=T == 1, PDL=pdl, num_warps=4, num_stages=tiles.down_stages,
        **options,
    )  # fmt: skip
    return out_TD
