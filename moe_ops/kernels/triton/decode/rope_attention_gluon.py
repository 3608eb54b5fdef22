"""From the projections of one token per sequence to its attention over a short cache, in Gluon.

    rope_attention_short    a sequence and a head of the cache: what `rope_attention.py` says; of a
                            longer cache what `one_query_kernel` finds in a part of its slots

Every warp has other slots, a share of them. Their keys are in its registers and their values in
shared memory before the projections are there. So behind these lie two barriers alone: one for the
turned heads of queries, which all warps read, and one for the parts of results, which each warp
scaled by its own largest score.

    [S, C, ...]  shares and the slots of each; [S, R, ...]  rows of the matrix unit: query heads
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from moe_ops.kernels.triton.decode.one_query import mask_at
from moe_ops.kernels.triton.decode.rope import normed
from moe_ops.kernels.triton.decode.rows_gluon import by_columns, eights_layout
from moe_ops.kernels.triton.experts.products.register_stream_steps import doublings
from moe_ops.kernels.triton.launch import await_turn, let_next_begin

cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit, wait = async_copy.commit_group, async_copy.wait_group

SHARES = gl.constexpr(8)  # warps
ROWS = gl.constexpr(16)  # of the matrix unit


@gluon.constexpr_function
def heads_layout(S, D):
    """The layout of query heads [H, D]: a warp has whole ones."""
    return gl.BlockedLayout([1, D // 32], [1, 32], [S, 1], [1, 0])


@gluon.constexpr_function
def rows_layout(S, X, D):
    """The layout of keys, or of queries beside them, [S, X, D]."""
    return eights_layout(S, X, D, doublings(X // 8, 1, 8), doublings(S, 0))


@gluon.constexpr_function
def values_layout(S, C, D):
    """The layout of values [S, C, D]: a thread has 16 bytes of each of its rows, which are pairs of
    neighbours."""
    registers = [*doublings(8, 2), [0, 1, 0], *doublings(C // 8, 1, 8), *doublings(D // 64, 2, 64)]
    lanes = [*doublings(4, 1, 2), *doublings(8, 2, 8)]
    return gl.DistributedLinearLayout(registers, lanes, doublings(S, 0), [], [S, C, D])


@gluon.constexpr_function
def parts_layout(S, R, D):
    """The layout of parts of results [S, R, D]: a thread has all of them of an element."""
    registers = [*doublings(D // 32, 2), *doublings(R // 8, 1, 8), *doublings(S, 0)]
    lanes = doublings(32, 2, D // 32)
    return gl.DistributedLinearLayout(registers, lanes, doublings(8, 1), [], [S, R, D])


@gluon.jit
def turned_heads(
    x_GD, other_GD, gain_ptr, gain_D, gain_other_D, cos_D, sin_D, d_D, D: gl.constexpr,
    EPS: gl.constexpr,
):  # fmt: skip
    """Heads, of which the other halves are given, too, normed if there is a gain, and turned; in
    their dtype."""
    dtype: gl.constexpr = x_GD.dtype
    x_GD, other_GD = x_GD.to(gl.float32), other_GD.to(gl.float32)
    if gain_ptr is not None:
        inverse_G = gl.rsqrt(gl.sum(x_GD * x_GD, 1) / D + EPS)
        x_GD = normed(x_GD, inverse_G, gain_D)
        other_GD = normed(other_GD, inverse_G, gain_other_D)
    other_GD = gl.where((d_D < D // 2)[None, :], -other_GD, other_GD)
    return (x_GD * cos_D[None, :] + other_GD * sin_D[None, :]).to(dtype)


@gluon.jit
def rope_attention_short(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slot_ptr, keys_ptr, values_ptr,
    q_gain_ptr, k_gain_ptr, mask_ptr, sinks_ptr, out_ptr, stats_ptr, mask_stride, stat_stride,
    N: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, C: gl.constexpr,
    PARTS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, W: gl.constexpr,
    ROWS_OF_ANGLES: gl.constexpr, EPS: gl.constexpr, SCALE: gl.constexpr, LEAST: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program: a sequence and a head of the cache, and one of PARTS of its slots. HEADS is 8 or
    16, no fewer than the G queries of that head. Of several parts out and stats are what
    `one_query_merge` reads, which is given the sinks."""
    S: gl.constexpr = SHARES
    pair = (gl.program_id(0) // PARTS).to(gl.int64)
    part = gl.program_id(0) % PARTS
    first = part * (S * C)
    b = pair // N
    keys_ptr += pair * SLOTS * D
    values_ptr += pair * SLOTS * DV
    mask_ptr += b * mask_stride
    if ROWS_OF_ANGLES > 1:
        cos_ptr += b * W
        sin_ptr += b * W
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, 1, 1], [1, 16, 8])
    of_keys: gl.constexpr = rows_layout(S, C, D)
    of_values: gl.constexpr = values_layout(S, C, DV)
    of_heads: gl.constexpr = heads_layout(S, D)
    of_parts: gl.constexpr = parts_layout(S, HEADS, DV)

    # What was there before the launch before.
    slot = gl.load(slot_ptr).to(gl.int32)
    mine = (slot >= first) & (slot < first + S * C)
    at_SC = first + seen_slots(S, C, gl.SliceLayout(2, of_keys))
    here_SC = mask_at(mask_ptr, at_SC, (at_SC < SLOTS) & (at_SC != slot), LEAST) > float("-inf")
    d_D = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, of_keys)))
    keys_SCD = gl.load(
        keys_ptr + at_SC[:, :, None] * D + d_D[None, None, :], mask=here_SC[:, :, None], other=0.0
    )
    at_SC = first + seen_slots(S, C, gl.SliceLayout(2, of_values))
    here_SC = mask_at(mask_ptr, at_SC, (at_SC < SLOTS) & (at_SC != slot), LEAST) > float("-inf")
    d_V = gl.arange(0, DV, gl.SliceLayout(0, gl.SliceLayout(1, of_values)))
    values_at = values_ptr + at_SC[:, :, None] * DV + d_V[None, None, :]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    values_held = gl.allocate_shared_memory(values_ptr.dtype.element_ty, [S, C, DV], flat)
    cp_async(values_held, values_at, mask=here_SC[:, :, None])
    commit()
    at_SC = first + seen_slots(S, C, gl.SliceLayout(1, mma))
    added_SC = mask_at(mask_ptr, at_SC, (at_SC < SLOTS) & (at_SC != slot), LEAST)
    d_D = gl.arange(0, D, gl.SliceLayout(0, of_heads))
    rows_G = gl.arange(0, HEADS, gl.SliceLayout(1, of_heads))
    head_G = pair * G + gl.minimum(rows_G, G - 1)  # rows behind the last are the last
    new_G = mask_at(mask_ptr, slot + 0 * rows_G, rows_G >= 0, LEAST)
    q_gain_D, q_other_D, k_gain_D, k_other_D = 0.0, 0.0, 0.0, 0.0
    other_D = (d_D + D // 2) % D
    if q_gain_ptr is not None:
        q_gain_D, q_other_D = gl.load(q_gain_ptr + d_D), gl.load(q_gain_ptr + other_D)
        k_gain_D, k_other_D = gl.load(k_gain_ptr + d_D), gl.load(k_gain_ptr + other_D)
    of_results: gl.constexpr = gl.SliceLayout(0, of_parts)
    r = gl.arange(0, HEADS, gl.SliceLayout(1, of_results))
    v = gl.arange(0, DV, gl.SliceLayout(0, of_results))
    sink_R = 0.0
    if sinks_ptr is not None:
        sink_R = gl.load(sinks_ptr + pair % N * G + gl.minimum(r, G - 1)).to(gl.float32)

    await_turn(PDL)
    # All loads, so that they are waited for at once.
    q_at = q_ptr + (head_G * D)[:, None]
    k_at = k_ptr + (pair * D + 0 * rows_G)[:, None]  # the new key, in every row
    q_GD, q_other_GD = gl.load(q_at + d_D[None, :]), gl.load(q_at + other_D[None, :])
    new_GD, new_other_GD = gl.load(k_at + d_D[None, :]), gl.load(k_at + other_D[None, :])
    cos_D, sin_D = gl.load(cos_ptr + d_D % W), gl.load(sin_ptr + d_D % W)
    new_V = gl.load(v_ptr + pair * DV + v)
    cos_D, sin_D = cos_D.to(gl.float32), sin_D.to(gl.float32)
    q_GD = turned_heads(
        q_GD, q_other_GD, q_gain_ptr, q_gain_D, q_other_D, cos_D, sin_D, d_D, D, EPS
    )
    new_GD = turned_heads(
        new_GD, new_other_GD, k_gain_ptr, k_gain_D, k_other_D, cos_D, sin_D, d_D, D, EPS
    )
    new_G += gl.sum(q_GD.to(gl.float32) * new_GD.to(gl.float32), 1) * SCALE
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_held = gl.allocate_shared_memory(q_GD.dtype, [HEADS, D], swizzled)
    new_held = gl.allocate_shared_memory(gl.float32, [HEADS], plain)
    q_held.store(q_GD)
    new_held.store(gl.where(mine, new_G, float("-inf")))
    gl.store(keys_ptr + slot * D + d_D[None, :] + 0 * rows_G[:, None], new_GD,
             mask=(rows_G[:, None] == 0) & mine)  # fmt: skip
    let_next_begin(PDL)  # not before: what that prefetches would be in the way

    wait(0)
    queries: gl.constexpr = rows_layout(S, HEADS, D)
    q_SRD = q_held.load(gl.SliceLayout(0, queries))[None, :, :]
    q_SRD, _ = gl.broadcast(q_SRD, gl.zeros([S, HEADS, D], q_SRD.dtype, queries))
    q_SRD = in_rows(by_columns(q_SRD))
    q_SRD = gl.convert_layout(q_SRD, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    k_SDC = by_columns(keys_SCD).permute([0, 2, 1])
    k_SDC = gl.convert_layout(k_SDC, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)
    scores = mma_v2(q_SRD, k_SDC, gl.zeros([S, ROWS, C], gl.float32, mma))
    scores = scores * SCALE + added_SC[:, None, :]
    high_SR = gl.max(scores, 2)
    # Of a share without a slot that is seen it is -inf, and -inf minus -inf is no number.
    safe_SR = gl.where(high_SR == float("-inf"), 0.0, high_SR)
    p = gl.exp(scores - safe_SR[:, :, None])
    total_SR = gl.sum(p, 2)
    p = gl.convert_layout(p.to(q_SRD.dtype), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    values_SCV = values_held.load(of_values)
    # Columns in another order, which `parts` is put back from.
    v_SCV = values_SCV.reshape([S, C, DV // 64, 8, 8]).permute([0, 1, 2, 4, 3])
    v_SCV = v_SCV.reshape([S, C, DV])
    v_SCV = gl.convert_layout(v_SCV, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)
    parts = mma_v2(p, v_SCV, gl.zeros([S, ROWS, DV], gl.float32, mma))
    parts = parts.reshape([S, ROWS, DV // 64, 8, 8]).permute([0, 1, 2, 4, 3])
    parts = heads_of(parts.reshape([S, ROWS, DV]), HEADS)
    pairs: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts_held = gl.allocate_shared_memory(gl.float32, [S, HEADS, DV], flat)
    high_held = gl.allocate_shared_memory(gl.float32, [S, HEADS], pairs)
    total_held = gl.allocate_shared_memory(gl.float32, [S, HEADS], pairs)
    parts_held.store(parts)
    high_held.store(heads_of(high_SR, HEADS))
    total_held.store(heads_of(total_SR, HEADS))

    high_SR = high_held.load(gl.SliceLayout(2, of_parts))
    new_R = new_held.load(gl.SliceLayout(1, of_results))
    top_R = gl.convert_layout(gl.max(high_SR, 0), new_R.type.layout, assert_trivial=True)
    top_R = gl.maximum(top_R, new_R)
    if sinks_ptr is not None:
        top_R = gl.maximum(top_R, sink_R)
    high_R = top_R
    top_R = gl.where(top_R == float("-inf"), 0.0, top_R)
    top_1R = gl.convert_layout(
        top_R, gl.SliceLayout(0, gl.SliceLayout(2, of_parts)), assert_trivial=True
    )
    share_SR = gl.exp(high_SR - top_1R[None, :])
    own_R = gl.exp(new_R - top_R)
    total_R = gl.sum(share_SR * total_held.load(gl.SliceLayout(2, of_parts)), 0)
    total_R = gl.convert_layout(total_R, own_R.type.layout, assert_trivial=True) + own_R
    out_RV = gl.sum(share_SR[:, :, None] * parts_held.load(of_parts), 0)
    own_V = gl.where(mine, new_V.to(gl.float32), 0.0)
    out_RV += own_R[:, None] * own_V[None, :]
    if sinks_ptr is not None:
        total_R += gl.exp(sink_R - top_R)
    if PARTS == 1:
        out_RV = out_RV / total_R[:, None]
    row_R = (pair * G + r) * PARTS + part
    out_RV = out_RV.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + row_R[:, None] * DV + v[None, :], out_RV, mask=r[:, None] < G)
    if PARTS > 1:
        gl.store(stats_ptr + row_R, high_R, mask=r < G)
        gl.store(stats_ptr + stat_stride + row_R, total_R, mask=r < G)
    gl.store(values_ptr + slot * DV + v[None, :] + 0 * r[:, None], new_V[None, :],
             mask=(r[:, None] == 0) & mine)  # fmt: skip


@gluon.jit
def seen_slots(S: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """[S, C]: the slots of shares."""
    s = gl.arange(0, S, gl.SliceLayout(1, layout))
    c = gl.arange(0, C, gl.SliceLayout(0, layout))
    return s[:, None] * C + c[None, :]


@gluon.jit
def in_rows(x):
    """[S, 16, D] of [S, heads, D]: zeros in rows that are no heads."""
    if x.shape[1] < ROWS:
        S: gl.constexpr = x.shape[0]
        D: gl.constexpr = x.shape[2]
        x = gl.join(x, gl.zeros_like(x)).permute([0, 3, 1, 2]).reshape([S, ROWS, D])
    return x


@gluon.jit
def heads_of(x, HEADS: gl.constexpr):
    """The first heads of [S, 16] or [S, 16, D]."""
    if HEADS < ROWS:
        S: gl.constexpr = x.shape[0]
        if len(x.shape) == 3:
            D: gl.constexpr = x.shape[2]
            x, _ = x.reshape([S, 2, HEADS, D]).permute([0, 2, 3, 1]).split()
        else:
            x, _ = x.reshape([S, 2, HEADS]).permute([0, 2, 1]).split()
    return x
