"""Adapters of experts beside the products of their weights: y = W x + s B (A x).

    narrow  u = s A x of each row, rounded; of a row without an adapter 0
    added   what a product adds to its sums: B u, in one more step along r, before its activation

Adapters may be several; each row has one or none. `rank_rows` and `rank_pairs` are `narrow` of rows
sorted by expert, and of a few tokens that nobody sorts, laid out as those products read x and h.
A and B are of each group, adapter times experts plus expert, and have any strides. In kernels
narrow_ptr points to u, and wide_ptr to B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import TINY_TOKENS, Weight
from moe_ops.kernels.triton.experts.formats.order import column_of
from moe_ops.kernels.triton.experts.schedule.sort import local_ids, most_units, unit_of
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

Pair = tuple[Tensor | None, Tensor | None]  # A and B, if there are any
RANKS_AT_ONCE = tl.constexpr(32)
LEAST = 16  # rows and columns of a product on matrix units
TURNED = 64  # columns of A that one program transposes


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of a layer as `experts_adapted` has them, of which a pair may be missing."""

    scale_N: Tensor
    a13_GrD: Tensor | None
    b13_GFr: Tensor | None
    a2_GrI: Tensor | None
    b2_GDr: Tensor | None
    adapter_T: Tensor | None

    @property
    def pair13(self) -> Pair:
        """A and B of the first weight."""
        return self.a13_GrD, self.b13_GFr

    @property
    def pair2(self) -> Pair:
        return self.a2_GrI, self.b2_GDr


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What a product adds for adapters: the rows u, the weights B, and the adapter of each row, or
    of each token; None: all have the first. Without `u` nothing is added. `weighted`: u times the
    routing weights of its rows, where that was asked for."""

    u: Tensor | None = None
    weighted: Tensor | None = None
    b_GFr: Tensor | None = None
    index: Tensor | None = None
    N: int = 1

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """u, B, the indices, and the strides of B, as kernels take them."""
        strides = (None,) * 3 if self.b_GFr is None else self.b_GFr.stride()
        return self.u, self.b_GFr, self.index, *strides

    @property
    def constants(self) -> dict[str, int]:
        """How many adapters there are, their rank, and it as tiles have it, for kernels."""
        rank = 0 if self.u is None else self.u.shape[1]
        return {"ADAPTERS": self.N, "RANK": rank, "TR": tile_of(rank)}


NOTHING = Added()


def tile_of(rank: int) -> int:
    """The columns of a tile that holds a rank."""
    return max(LEAST, triton.next_power_of_2(rank))


@triton.jit
def adapters_at(ptrs, inside, ADAPTERS: tl.constexpr):
    """The adapters of rows or tokens, -1 where there is none: an index is told by all its bits."""
    index = tl.load(ptrs, mask=inside, other=-1)
    return tl.where((index >= 0) & (index < ADAPTERS), index, -1).to(tl.int32)


@triton.jit
def sums_of_rank(
    x_N1, inside_N, a_ptr, group, stride_ag, stride_ar, stride_ad,
    D: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """[BN, BR]: rows at x_N1 times A of a group. W is the format in whose order columns of rows
    are, None: they are in order."""
    r = tl.arange(0, BR)
    # Of many groups in one tensor the ranks, too, may lie 2^31 elements apart.
    at_R = group.to(tl.int64) * stride_ag + r.to(tl.int64) * stride_ar
    a_1R = (a_ptr + at_R)[None, :]
    u_NR = tl.zeros((BN, BR), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        inside_D = d < D
        at_ND, inside_ND = x_N1 + column_of(d, W)[None, :], inside_N[:, None] & inside_D[None, :]
        x_ND = tl.load(at_ND, mask=inside_ND, other=0.0)
        inside_DR = inside_D[:, None] & (r < RANK)[None, :]
        at_DR = a_1R + (d.to(tl.int64) * stride_ad)[:, None]
        a_DR = tl.load(at_DR, mask=inside_DR, other=0.0)
        u_NR = tl.dot(x_ND, a_DR, u_NR, input_precision="ieee")
    return u_NR


@triton.jit
def scaled_sums(
    x_N1, inside_N, index_N, a_ptr, scale_ptr, e, stride_ag, stride_ar, stride_ad,
    INDEXED: tl.constexpr, E: tl.constexpr, ADAPTERS: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """[BN, BR]: rows times A of their adapters and the factors of these; 0 of rows without one."""
    if INDEXED:
        u_NR = tl.zeros((BN, BR), tl.float32)
        for n in range(ADAPTERS):
            mine_N = index_N == n
            if tl.max(mine_N.to(tl.int32), 0) > 0:
                sum_NR = sums_of_rank(
                    x_N1, inside_N & mine_N, a_ptr, n * E + e, stride_ag, stride_ar, stride_ad, D,
                    W, RANK, BN, BR, BD,
                )  # fmt: skip
                u_NR = tl.where(mine_N[:, None], sum_NR * tl.load(scale_ptr + n), u_NR)
    else:
        u_NR = sums_of_rank(
            x_N1, inside_N, a_ptr, e, stride_ag, stride_ar, stride_ad, D, W, RANK, BN, BR, BD
        ) * tl.load(scale_ptr)  # fmt: skip
    return u_NR


@triton.jit
def add_adapter(
    acc, e, row_M, inside_M, u_row_N, token_N, inside_N, narrow_ptr, wide_ptr, index_ptr, stride_bg,
    stride_bf, stride_br,
    E: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, TR: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):  # fmt: skip
    """acc and B u: acc is [M, N], of rows of the weights of experts and of tokens, or [N, M] with
    TOKENS_FIRST. e is an expert, or one for each row; u lies in rows u_row_N, and the adapter of
    each at token_N of the indices."""
    at_M = row_M.to(tl.int64) * stride_bf + e.to(tl.int64) * stride_bg
    at_N = u_row_N.to(tl.int64) * RANK
    if index_ptr is None:
        acc = add_ranks(
            acc, wide_ptr, at_M, inside_M, narrow_ptr, at_N, inside_N, stride_br, RANK, TR,
            TOKENS_FIRST,
        )  # fmt: skip
    else:
        index_N = adapters_at(index_ptr + token_N, inside_N, ADAPTERS)
        for n in range(ADAPTERS):
            mine_N = index_N == n
            if tl.max(mine_N.to(tl.int32), 0) > 0:
                own_ptr = wide_ptr + tl.cast(n * E, tl.int64) * stride_bg
                sums = add_ranks(
                    acc, own_ptr, at_M, inside_M, narrow_ptr, at_N, inside_N, stride_br, RANK, TR,
                    TOKENS_FIRST,
                )  # fmt: skip
                # What adapters of others hold is no part of a row's sum, even if it is no number.
                acc = tl.where(mine_N[:, None] if TOKENS_FIRST else mine_N[None, :], sums, acc)
    return acc


@triton.jit
def add_ranks(
    acc, wide_ptr, at_M, inside_M, narrow_ptr, at_N, inside_N, stride_br,
    RANK: tl.constexpr, TR: tl.constexpr, TOKENS_FIRST: tl.constexpr,
):  # fmt: skip
    """acc and B u, a few ranks at a time: of more, registers would be short."""
    STEP: tl.constexpr = RANKS_AT_ONCE if TR > RANKS_AT_ONCE else TR
    for first in tl.static_range(0, RANK, STEP):
        r = first + tl.arange(0, STEP)
        inside_R, at_R = r < RANK, r.to(tl.int64) * stride_br
        if TOKENS_FIRST:
            u_at, u_inside = at_N[:, None] + r[None, :], inside_N[:, None] & inside_R[None, :]
            b_at, b_inside = at_M[None, :], inside_M[None, :] & inside_R[:, None]
            b = tl.load(wide_ptr + b_at + at_R[:, None], mask=b_inside, other=0.0)
            u = tl.load(narrow_ptr + u_at, mask=u_inside, other=0.0)
            acc = tl.dot(u, b, acc, input_precision="ieee")
        else:
            u_at, u_inside = at_N[None, :] + r[:, None], inside_N[None, :] & inside_R[:, None]
            b_at, b_inside = at_M[:, None], inside_M[:, None] & inside_R[None, :]
            b = tl.load(wide_ptr + b_at + at_R[None, :], mask=b_inside, other=0.0)
            u = tl.load(narrow_ptr + u_at, mask=u_inside, other=0.0)
            acc = tl.dot(b, u, acc, input_precision="ieee")
    return acc


@triton.jit
def store_narrow(narrow_ptr, u_NR, row_N, inside_N, RANK: tl.constexpr, BR: tl.constexpr):
    """u of these rows, to where products read it."""
    r = tl.arange(0, BR)
    at_NR = narrow_ptr + (row_N.to(tl.int64) * RANK)[:, None] + r[None, :]
    mask_NR = inside_N[:, None] & (r < RANK)[None, :]
    tl.store(at_NR, u_NR.to(narrow_ptr.dtype.element_ty), mask=mask_NR)


@triton.jit
def rank_rows(
    x_ptr, rows_ptr, ends_ptr, adapter_ptr, a_ptr, scale_ptr, weights_ptr, narrow_ptr,
    weighted_ptr, index_ptr, stride_x, stride_ag, stride_ar, stride_ad,
    E: tl.constexpr, ADAPTERS: tl.constexpr, K: tl.constexpr, OF_TOKENS: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BN sorted rows of one expert; x has a row for each token, or for each of
    these. Writes down the adapter of each, too, if tokens have one each."""
    take_turn(PDL)
    e, _, first, count = unit_of(ends_ptr, tl.program_id(0), 1, tl.arange(0, BE), E, BN, None)
    if e >= E:
        return
    n = tl.arange(0, BN)
    inside_N, row_N = n < count, first + n
    pair_N = tl.load(rows_ptr + row_N, mask=inside_N, other=0)
    token_N = pair_N // K
    index_N = token_N
    if adapter_ptr is not None:
        index_N = adapters_at(adapter_ptr + token_N, inside_N, ADAPTERS)
        tl.store(index_ptr + row_N, index_N, mask=inside_N)
    x_row_N = token_N if OF_TOKENS else row_N
    x_N1 = (x_ptr + x_row_N.to(tl.int64) * stride_x)[:, None]
    u_NR = scaled_sums(
        x_N1, inside_N, index_N, a_ptr, scale_ptr, e, stride_ag, stride_ar, stride_ad,
        adapter_ptr is not None, E, ADAPTERS, D, W, RANK, BN, BR, BD,
    )  # fmt: skip
    store_narrow(narrow_ptr, u_NR, row_N, inside_N, RANK, BR)
    if weighted_ptr is not None:
        weight_N = tl.load(weights_ptr + pair_N, mask=inside_N, other=0.0).to(tl.float32)
        store_narrow(weighted_ptr, u_NR * weight_N[:, None], row_N, inside_N, RANK, BR)


# One compiled kernel serves every number of tokens.
@triton.jit(do_not_specialize=["T", "N_MAP"])
def rank_pairs(
    x_ptr, ids_ptr, expert_map_ptr, adapter_ptr, a_ptr, scale_ptr, narrow_ptr, T, N_MAP, stride_x,
    stride_ag, stride_ar, stride_ad,
    E: tl.constexpr, ADAPTERS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    OF_TOKENS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: all tokens with the expert of one pair; x has a row for each token, or for each
    of these as h of `tiny_up` has. Of a token that did not choose the expert u is unspecified."""
    take_turn(PDL)
    pair = tl.program_id(0)
    e = local_ids(ids_ptr, expert_map_ptr, pair, pair < T * K, E, N_MAP)
    if e >= E:
        return
    n, k = tl.arange(0, BN), tl.arange(0, BK)
    at_NK, inside_NK = n[:, None] * K + k[None, :], (n < T)[:, None] & (k < K)[None, :]
    ids_NK = local_ids(ids_ptr, expert_map_ptr, at_NK, inside_NK, E, N_MAP)
    chosen_N = tl.max((ids_NK == e).to(tl.int32), 1) > 0
    index_N = n
    if adapter_ptr is not None:
        index_N = adapters_at(adapter_ptr + n, chosen_N, ADAPTERS)
    row_N = pair * T + n
    x_row_N = n if OF_TOKENS else row_N
    x_N1 = (x_ptr + x_row_N.to(tl.int64) * stride_x)[:, None]
    u_NR = scaled_sums(
        x_N1, chosen_N, index_N, a_ptr, scale_ptr, e, stride_ag, stride_ar, stride_ad,
        adapter_ptr is not None, E, ADAPTERS, D, W, RANK, BN, BR, BD,
    )  # fmt: skip
    store_narrow(narrow_ptr, u_NR, row_N, n < T, RANK, BR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows and columns of x a step, buffers of both operands, warps."""

    BN: int
    BD: int
    stages: int
    warps: int


# Few rows wait for one load after the other, many for the memory: both have as many on their way as
# fit the shared memory of every GPU. On an H100 few rows take as long with 128 to 1024 columns a
# step, as products run beside them.
FEW, MANY = Tile(BN=16, BD=256, stages=4, warps=4), Tile(BN=64, BD=128, stages=4, warps=4)
WIDE = 64  # columns of a tile, from which on shorter steps fit


def tile_for(rows: int, experts: int, x: Tensor, rank: int, plain: bool = True) -> Tile:
    """The tile of a `narrow` of so many rows. Exact products of float32 take short steps, and what
    is not `plain`, with other orders of columns or several adapters, has addresses to keep."""
    tile = FEW if rows <= LEAST * experts else MANY
    if x.element_size() > 2:
        return replace(tile, BD=32, stages=2)
    if tile_of(rank) > WIDE or not plain:
        return replace(tile, BN=min(tile.BN, 32), BD=64, stages=3)
    return tile


def narrow_rows(
    x: Tensor, order: tuple[Tensor, Tensor], adapters: Adapters, a_GrD: Tensor, top_k: int,
    experts: int, *, of_tokens: bool, weight: Weight | None = None,
    weights_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(u, the adapter of each row, u times the routing weights that are given) of rows in the order
    of experts, the pair in each and their ends: of the tokens that they have, or of x where it has
    a row for each."""
    (rows_R, ends_E), (_, rank, D) = order, a_GrD.shape
    R, adapter_T = rows_R.shape[0], adapters.adapter_T
    tile = tile_for(R, experts, x, rank, weight is None and adapter_T is None)
    u_Rr = x.new_empty(R, rank)
    weighted_Rr = None if weights_TK is None else x.new_empty(R, rank)
    index_R = None if adapter_T is None else rows_R.new_empty(R)
    if R == 0:
        return u_Rr, index_R, weighted_Rr
    launch(
        rank_rows, (most_units(R, experts, tile.BN),),
        x, rows_R, ends_E, adapter_T, a_GrD, adapters.scale_N, weights_TK, u_Rr, weighted_Rr,
        index_R, x.stride(0), *a_GrD.stride(),
        E=experts, ADAPTERS=adapters.scale_N.shape[0], K=top_k, OF_TOKENS=of_tokens, D=D,
        W=weight, RANK=rank, BE=max(2, triton.next_power_of_2(experts)), BN=tile.BN,
        BR=tile_of(rank), BD=tile.BD, num_warps=tile.warps, num_stages=tile.stages,
        **pdl_options(x),
    )  # fmt: skip
    return u_Rr, index_R, weighted_Rr


def narrow_pairs(
    x: Tensor, ids_TK: Tensor, expert_map: Tensor | None, adapters: Adapters, a_GrD: Tensor,
    experts: int, *, of_tokens: bool, weight: Weight | None = None,
) -> Tensor:  # fmt: skip
    """u of each pair of a few tokens, and of each of these: [pairs * tokens, r]."""
    (T, K), (_, rank, D) = ids_TK.shape, a_GrD.shape
    tile = tile_for(T, experts, x, rank, weight is None and adapters.adapter_T is None)
    u_Pr = x.new_empty(T * K * T, rank)
    n_map = 0 if expert_map is None else expert_map.shape[0]
    launch(
        rank_pairs, (T * K,),
        x, ids_TK, expert_map, adapters.adapter_T, a_GrD, adapters.scale_N, u_Pr, T, n_map,
        x.stride(0), *a_GrD.stride(),
        E=experts, ADAPTERS=adapters.scale_N.shape[0], K=K, BK=triton.next_power_of_2(K),
        OF_TOKENS=of_tokens, D=D, W=weight, RANK=rank, BN=TINY_TOKENS, BR=tile_of(rank), BD=tile.BD,
        num_warps=tile.warps, num_stages=tile.stages, **pdl_options(x),
    )  # fmt: skip
    return u_Pr


def added_rows(
    x: Tensor, order: tuple[Tensor, Tensor], adapters: Adapters | None, pair: Pair, top_k: int,
    experts: int, *, of_tokens: bool, weight: Weight | None = None,
    weights_TK: Tensor | None = None,
) -> Added:  # fmt: skip
    """What a product of sorted rows adds for a pair of its adapters, by `narrow_rows`."""
    a_GrD, b_GFr = pair
    if adapters is None or a_GrD is None or b_GFr is None:
        return NOTHING
    u_Rr, index_R, weighted_Rr = narrow_rows(
        x, order, adapters, a_GrD, top_k, experts, of_tokens=of_tokens, weight=weight,
        weights_TK=weights_TK,
    )  # fmt: skip
    N = adapters.scale_N.shape[0]
    return Added(u=u_Rr, weighted=weighted_Rr, b_GFr=b_GFr, index=index_R, N=N)


def turned(pair: Pair, whole: bool) -> Pair:
    """The pair that a product by the transposed weight adds: B narrows, and A widens. `whole`: A is
    written anew, as the kernel for Hopper copies what is added as it copies weights."""
    a_GrD, b_GFr = pair
    if a_GrD is None or b_GFr is None:
        return pair
    return b_GFr.transpose(1, 2), _transposed(a_GrD) if whole else a_GrD.transpose(1, 2)


def _transposed(a_GrD: Tensor) -> Tensor:
    """[G, D, r], contiguous, by a launch that can be repeated."""
    G, rank, D = a_GrD.shape
    out_GDr = a_GrD.new_empty(G, D, rank)
    launch(
        transpose_kernel, (G, triton.cdiv(D, TURNED)), a_GrD, out_GDr, *a_GrD.stride(),
        D=D, RANK=rank, BR=tile_of(rank), BD=TURNED, num_warps=4, **pdl_options(a_GrD),
    )  # fmt: skip
    return out_GDr


@triton.jit
def transpose_kernel(
    a_ptr, out_ptr, stride_ag, stride_ar, stride_ad,
    D: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one group by one program."""
    take_turn(PDL)
    group, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    r = tl.arange(0, BR)
    inside_RD = (r < RANK)[:, None] & (d < D)[None, :]
    at_R, at_D = r.to(tl.int64) * stride_ar, d.to(tl.int64) * stride_ad
    a_RD = tl.load(a_ptr + group * stride_ag + at_R[:, None] + at_D[None, :], mask=inside_RD)
    out_DR = out_ptr + group * D * RANK + d[:, None] * RANK + r[None, :]
    tl.store(out_DR, tl.trans(a_RD), mask=tl.trans(inside_RD))


def added_pairs(
    x: Tensor, ids_TK: Tensor, expert_map: Tensor | None, adapters: Adapters | None, pair: Pair,
    experts: int, *, of_tokens: bool, weight: Weight | None = None,
) -> Added:  # fmt: skip
    """What a product of a few tokens that nobody sorts adds for a pair of its adapters."""
    a_GrD, b_GFr = pair
    if adapters is None or a_GrD is None or b_GFr is None:
        return NOTHING
    u_Pr = narrow_pairs(
        x, ids_TK, expert_map, adapters, a_GrD, experts, of_tokens=of_tokens, weight=weight
    )
    return Added(u=u_Pr, b_GFr=b_GFr, index=adapters.adapter_T, N=adapters.scale_N.shape[0])
