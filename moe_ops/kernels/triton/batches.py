"""Rows that arrived from ranks, into batches by experts, and sums of what experts made of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.ranks import words_of

PAIRS, WORDS, COLUMNS = 1024, 1024, 1024
ONE_LAUNCH = 4096  # pairs up to which every program reads those of all rows before its own
AT_ONCE = 2048  # of them


@triton.jit
def rows_before(ids_ptr, id, end, K: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr):
    """How many of the rows before `end` name an expert."""
    k, count = tl.arange(0, BK)[None, :], 0
    for first in range(0, end, BG):
        g = (first + tl.arange(0, BG))[:, None]
        ids_GK = tl.load(ids_ptr + g * K + k, mask=(g < end) & (k < K), other=-1)
        count += tl.sum(tl.max((ids_GK == id).to(tl.int32), 1), 0)
    return count


@triton.jit(do_not_specialize=["G"])
def in_batches_kernel(
    ids_ptr, x_ptr, scale_ptr, slot_ptr, counts_ptr, x_out, scale_out, G,
    E: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr, X: tl.constexpr,
    S: tl.constexpr, BX: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each pair, and some words of its row: into the slot of its expert, which is
    found by counting the rows before it, so that no program waits for another; behind these one for
    each expert, which counts its rows."""
    take_turn(PDL)
    pair, part = tl.program_id(0), tl.program_id(1)
    if pair >= G * K:
        e = pair - G * K
        if part == 0:
            tl.store(counts_ptr + e, rows_before(ids_ptr, e, G, K, BG, BK))
    else:
        row, id = pair // K, tl.load(ids_ptr + pair)
        slot = tl.cast(-1, tl.int32)
        if (id >= 0) & (id < E):
            word, s = part * BX + tl.arange(0, BX), tl.arange(0, BS)
            words = tl.load(x_ptr + row.to(tl.int64) * X + word, mask=word < X, other=0)
            mask_S = s < tl.where(part == 0, S, 0)
            scales = tl.load(scale_ptr + row.to(tl.int64) * S + s, mask=mask_S, other=0)
            slot = id * G + rows_before(ids_ptr, id, row, K, BG, BK)
            # Pairs of one row and one expert store the same words there.
            tl.store(x_out + slot.to(tl.int64) * X + word, words, mask=word < X)
            tl.store(scale_out + slot.to(tl.int64) * S + s, scales, mask=mask_S)
        if part == 0:
            tl.store(slot_ptr + pair, slot)


@triton.jit
def ids_of_token(ids_ptr, pair, inside, choice, K: tl.constexpr):
    """The id of another choice of the tokens of some pairs."""
    return tl.load(ids_ptr + pair - pair % K + choice, mask=inside, other=-1)


@triton.jit(do_not_specialize=["R", "M"])
def slots_kernel(
    ids_ptr, slot_ptr, counts_ptr, R, M,
    E: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each expert, and one for pairs of none: the slots of an expert's pairs in
    their order. Pairs of a row that named the expert before are left to the copy."""
    take_turn(PDL)
    e, count = tl.program_id(0), 0
    for first in range(0, R, BR):
        pair = first + tl.arange(0, BR)
        inside = pair < R
        id = tl.load(ids_ptr + pair, mask=inside, other=-1)
        mine = inside & (id == e)
        if e == E:
            tl.store(slot_ptr + pair, -1, mask=inside & ((id < 0) | (id >= E)))
        else:
            for k in range(K):
                before = mine & (pair % K > k)
                mine = mine & (ids_of_token(ids_ptr, pair, before, k, K) != e)
            own = mine.to(tl.int32)
            tl.store(slot_ptr + pair, e * M + count + tl.cumsum(own, 0) - 1, mask=mine)
            count += tl.sum(own, 0)
    if e < E:
        tl.store(counts_ptr + e, count)


@triton.jit
def copy_kernel(
    ids_ptr, slot_ptr, x_ptr, scale_ptr, x_out, scale_out,
    E: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, X: tl.constexpr, S: tl.constexpr,
    BX: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each pair, and some words of its row: into the slot of its expert, unless a
    pair of the row did that, whose slot then is its own."""
    take_turn(PDL)
    pair = tl.program_id(0)
    token, k = pair // K, tl.arange(0, BK)
    id = tl.load(ids_ptr + pair)
    ids_K = tl.load(ids_ptr + token * K + k, mask=k < K, other=-1)
    if (id >= 0) & (id < E):
        first = tl.min(tl.where((ids_K == id) & (k < K), k, BK), 0)
        slot = tl.load(slot_ptr + token * K + first)
        word = tl.program_id(1) * BX + tl.arange(0, BX)
        if first < pair % K:
            if tl.program_id(1) == 0:
                tl.store(slot_ptr + pair, slot)
        else:
            from_ptr, to_ptr = x_ptr + token.to(tl.int64) * X, x_out + slot.to(tl.int64) * X
            tl.store(to_ptr + word, tl.load(from_ptr + word, mask=word < X), mask=word < X)
            if S > 0:  # noqa: SIM102  a constant, which compilers decide by
                if tl.program_id(1) == 0:
                    part = tl.arange(0, BS)
                    scale = tl.load(scale_ptr + token.to(tl.int64) * S + part, mask=part < S)
                    tl.store(scale_out + slot.to(tl.int64) * S + part, scale, mask=part < S)


@on_its_device
def in_batches(
    x_GD: Tensor, scale_GS: Tensor, ids_GK: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`in_batches` of `moe_ops/ranks/batches.py`, of rows that are whole words."""
    (G, K), D, S = ids_GK.shape, x_GD.shape[1], scale_GS.shape[1]
    slot_GK, counts_E = ids_GK.new_empty((G, K)), ids_GK.new_empty(experts)
    x_EMD, scale_EMS = x_GD.new_empty((experts, G, D)), scale_GS.new_empty((experts, G, S))
    options = pdl_options(ids_GK)
    X, words = D * x_GD.dtype.itemsize // 4, S * scale_GS.dtype.itemsize // 4
    BX, BK = min(WORDS, triton.next_power_of_2(X)), triton.next_power_of_2(K)
    BS, parts = triton.next_power_of_2(max(1, words)), triton.cdiv(X, BX)
    moved = [words_of(t) if t.shape[-1] else t for t in (x_GD, scale_GS, x_EMD, scale_EMS)]
    if G * K <= ONE_LAUNCH:
        in_batches_kernel[(G * K + experts, parts)](
            ids_GK, *moved[:2], slot_GK, counts_E, *moved[2:], G,
            E=experts, K=K, BK=BK, BG=min(triton.next_power_of_2(G), max(1, AT_ONCE // BK)),
            X=X, S=words, BX=BX, BS=BS, num_warps=4, **options,
        )  # fmt: skip
        return x_EMD, scale_EMS, slot_GK, counts_E
    slots_kernel[(experts + 1,)](
        ids_GK, slot_GK, counts_E, G * K, G,
        E=experts, K=K, BR=min(PAIRS, max(16, triton.next_power_of_2(G * K))), num_warps=4,
        **options,
    )  # fmt: skip
    copy_kernel[(G * K, parts)](
        ids_GK, slot_GK, *moved,
        E=experts, K=K, BK=BK, X=X, S=words, BX=BX, BS=BS, num_warps=4, **options,
    )  # fmt: skip
    return x_EMD, scale_EMS, slot_GK, counts_E


@triton.jit
def sum_slots_kernel(
    y_ptr, slot_ptr, weights_ptr, out_ptr, served_ptr,
    K: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[g] = sum over k of weight[g, k] * y[slot of (g, k)], in the order of k, rounded; and
    whether there is any."""
    take_turn(PDL)
    g, k = tl.program_id(0).to(tl.int64), tl.arange(0, BK)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    slot_K = tl.load(slot_ptr + g * K + k, mask=k < K, other=-1)
    held_K = slot_K >= 0
    y_KD = tl.load(
        y_ptr + slot_K.to(tl.int64)[:, None] * D + d[None, :],
        mask=held_K[:, None] & (d < D)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    weight_K = tl.load(weights_ptr + g * K + k, mask=held_K, other=0.0).to(tl.float32)
    out_D = tl.sum(y_KD * weight_K[:, None], 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g * D + d, out_D, mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(served_ptr + g, tl.max(held_K.to(tl.int32), 0))


@on_its_device
def from_batches(y_EMD: Tensor, weights_GK: Tensor, slot_GK: Tensor) -> tuple[Tensor, Tensor]:
    """(y_GD, served_G) as `from_batches` and `served` of `moe_ops/ranks/batches.py` have them."""
    (G, K), D = slot_GK.shape, y_EMD.shape[2]
    y_GD, served_G = y_EMD.new_empty((G, D)), slot_GK.new_empty(G)
    BD = min(COLUMNS, triton.next_power_of_2(D))
    sum_slots_kernel[(G, triton.cdiv(D, BD))](
        y_EMD, slot_GK, weights_GK, y_GD, served_G,
        K=K, D=D, BK=triton.next_power_of_2(K), BD=BD, num_warps=4, **pdl_options(y_EMD),
    )  # fmt: skip
    return y_GD, served_G
