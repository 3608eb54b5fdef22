"""Attention of one query token per sequence over a cache with a mask, in one launch or two.

Queries that share a key are the rows of one tile, and programs share the slots of the cache:

    one_query_kernel    the output of a sequence and a head of the cache, or, where several programs
                        share its slots, what each of them found: the largest score, the sum of the
                        exponentials below it, and the values weighted with these
    one_query_merge     the output from what the programs found, in the order of the slots

A second launch merges, rather than whichever program comes last: these would count arrivals in
memory that outlives a call, which calls on two streams would share. Each launch waits for the one
before at once: the query, the keys and the values come from it or from shortly before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.decode.one_query_plan import (
    MERGED,
    MOST_HELD,
    AttentionPlan,
    invariant_plan_for,
    plan_for,
    power_of_two,
)
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, processors, take_turn
from moe_ops.kernels.triton.replay import launch


@on_its_device
def attend(
    q_BHD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    mask_BS: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
    plan: AttentionPlan | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """The op `one_query` of arguments that its `refusal` lets pass. What is in
    hidden slots behind the last that is not hidden does not matter. Of an invariant call neither
    does how many sequences and slots there are, nor which slot is the first that is not hidden."""
    B, H, D = q_BHD.shape
    C, N, slots, DV = v_BNSD.shape
    group = H // N
    rows = max(16, power_of_two(group))
    row_bytes = (D + DV) * k_BNSD.element_size()
    if invariant:
        plan = invariant_plan_for(slots, row_bytes, rows * DV)
    elif plan is None:
        plan = plan_for(B * N, slots, row_bytes, rows * DV, processors(q_BHD))
    options = pdl_options(q_BHD)
    # An argument that a launch does not read is some tensor; it is not looked at.
    sinks = q_BHD if sinks_H is None else sinks_H
    out = torch.empty(B, H, DV, dtype=v_BNSD.dtype, device=v_BNSD.device)
    found, stats = out, q_BHD
    if plan.splits > 1:
        found, stats = room_for_parts(out, plan.splits)
    launch(
        one_query_kernel,
        (B * N, plan.splits),
        q_BHD,
        k_BNSD,
        v_BNSD,
        mask_BS,
        sinks,
        found,
        stats,
        N,
        mask_BS.stride(0),
        slots=slots,
        W=B // C,
        G=group,
        BG=rows,
        D=D,
        DV=DV,
        BS=plan.tile,
        SPAN=plan.span,
        BL=power_of_two(plan.span),
        SPLITS=plan.splits,
        SINKS=sinks_H is not None and plan.splits == 1,
        FROM_FIRST=invariant,
        LEAST=least_of(mask_BS),
        SCALE=scale,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **options,
    )
    if plan.splits > 1:
        merge(found, stats, out, sinks_H, invariant=invariant)
    return out


def room_for_parts(out: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Where programs that share the slots of a head put what they found for `out` [B, H, DV]:
    weighted values [B * H, parts, DV], and [2, B * H, parts], the largest scores and the sums of
    exponentials."""
    B, H, DV = out.shape
    found = torch.empty(B * H, parts, DV, dtype=torch.float32, device=out.device)
    return found, torch.empty(2, B * H, parts, dtype=torch.float32, device=out.device)


def merge(
    found: Tensor, stats: Tensor, out: Tensor, sinks_H: Tensor | None, *, invariant: bool = False
) -> None:
    """Write to `out` what follows from all that programs found, and from sinks if there are any."""
    rows, parts, DV = found.shape
    merged = MERGED if invariant else power_of_two(parts)
    launch(
        one_query_merge, (rows,),
        found, stats, found if sinks_H is None else sinks_H, out, out.shape[1], rows * parts,
        SPLITS=parts, BP=merged, DV=DV, SINKS=sinks_H is not None,
        num_warps=8 if merged * DV > MOST_HELD else 4, **pdl_options(out),
    )  # fmt: skip


def least_of(mask: Tensor) -> float:
    """What a mask that is added has to be more than to hide nothing, for `mask_at`; 0.0 if the mask
    is bool and says what is seen."""
    return 0.0 if mask.dtype == torch.bool else torch.finfo(mask.dtype).min / 2


@triton.jit
def mask_at(mask_ptr, at, inside, LEAST: tl.constexpr):
    """What the mask adds to the scores of slots: -inf to those it hides or that are not inside."""
    if LEAST == 0.0:
        seen = tl.load(mask_ptr + at, mask=inside, other=0).to(tl.int32)
        return tl.where(seen != 0, 0.0, float("-inf"))
    added = tl.load(mask_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(added > LEAST, added, float("-inf"))


@triton.jit
def one_query_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, sinks_ptr, found_ptr, stats_ptr,
    N, mask_stride,
    slots: tl.constexpr, W: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BS: tl.constexpr, SPAN: tl.constexpr, BL: tl.constexpr, SPLITS: tl.constexpr,
    SINKS: tl.constexpr, FROM_FIRST: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a query and a head of the cache, SPAN of its slots, in tiles of BS. W queries in
    a row share a sequence of the cache.

    The mask comes first: what is behind the last slot that it shows is not read, nor are tiles
    before the first. Then all that is in flight at once is asked for at once. FROM_FIRST: spans
    begin at the first slot that the mask shows, which padding before a sequence moves.
    """
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    mask_ptr += (pair // N) * mask_stride
    rows, dims, out_dims = tl.arange(0, BG), tl.arange(0, D), tl.arange(0, DV)
    high = tl.full((BG,), float("-inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    acc = tl.zeros((BG, DV), tl.float32)
    held = pair
    if W > 1:
        held = pair // (W * N) * N + pair % N
    k_ptr += held * slots * D
    v_ptr += held * slots * DV
    lead = split * SPAN
    take_turn(PDL)
    q = tl.load(
        q_ptr + (pair * G + rows[:, None]) * D + dims[None, :], mask=rows[:, None] < G, other=0.0
    )
    every = tl.arange(0, BL)
    if FROM_FIRST:
        begin = 0 * split + slots
        for at in range(0, slots, BL):
            shown = mask_at(mask_ptr, at + every, at + every < slots, LEAST) > float("-inf")
            begin = tl.minimum(begin, tl.min(tl.where(shown, at + every, slots)))
        lead += begin
    own = (every < SPAN) & (lead + every < slots)
    seen = mask_at(mask_ptr, lead + every, own, LEAST) > float("-inf")
    end = lead + tl.max(tl.where(seen, every + 1, 0))
    first = lead
    if SPAN > 2 * BS:  # of fewer tiles, one that is read in vain is no worse than to find out
        first += tl.min(tl.where(seen, every, SPAN)) // BS * BS
    at = first + tl.arange(0, BS)
    added = mask_at(mask_ptr, at, at < end, LEAST)
    for start in range(first, end, BS):
        at = start + tl.arange(0, BS)
        where = at[:, None]
        k = tl.load(k_ptr + where * D + dims[None, :], mask=where < end, other=0.0)
        v = tl.load(v_ptr + where * DV + out_dims[None, :], mask=where < end, other=0.0)
        following = mask_at(mask_ptr, at + BS, at + BS < end, LEAST)  # in time for its tile
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE + added[None, :]
        new = tl.maximum(high, tl.max(scores, 1))
        # Where no slot is seen yet -inf remains, and -inf minus -inf is no number.
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(scores - safe[:, None])
        shrink = tl.exp(high - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        high, added = new, following

    row = pair * G + rows
    if SINKS:
        sink = tl.load(sinks_ptr + (pair % N) * G + rows, mask=rows < G, other=0.0).to(tl.float32)
        top = tl.maximum(high, sink)
        shrink = tl.exp(high - top)
        total = total * shrink + tl.exp(sink - top)
        acc = acc * shrink[:, None]
    if SPLITS == 1:
        acc = acc / total[:, None]
    else:
        here = row * SPLITS + split
        pairs = tl.num_programs(0).to(tl.int64)
        tl.store(stats_ptr + here, high, mask=rows < G)
        tl.store(stats_ptr + pairs * G * SPLITS + here, total, mask=rows < G)
    tl.store(
        found_ptr + (row * SPLITS + split)[:, None] * DV + out_dims[None, :],
        acc.to(found_ptr.dtype.element_ty),
        mask=rows[:, None] < G,
    )


@triton.jit
def one_query_merge(
    found_ptr, stats_ptr, sinks_ptr, out_ptr, H, stat_stride,
    SPLITS: tl.constexpr, BP: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: the output of one query head from what the programs found in its slots. More
    than BP of them are added BP at a time, in their order."""
    row = tl.program_id(0).to(tl.int64)
    p, out_dims = tl.arange(0, BP), tl.arange(0, DV)
    here = row * SPLITS + p
    take_turn(PDL)
    high_P = tl.load(stats_ptr + here, mask=p < SPLITS, other=float("-inf"))
    total_P = tl.load(stats_ptr + stat_stride + here, mask=p < SPLITS, other=0.0)
    found_PV = tl.load(
        found_ptr + here[:, None] * DV + out_dims[None, :], mask=p[:, None] < SPLITS, other=0.0
    )
    top = tl.max(high_P, 0)
    for first in range(BP, SPLITS, BP):
        more_P = tl.load(stats_ptr + here + first, mask=first + p < SPLITS, other=float("-inf"))
        top = tl.maximum(top, tl.max(more_P, 0))
    if SINKS:
        sink = tl.load(sinks_ptr + row % H).to(tl.float32)
        top = tl.maximum(top, sink)
    weight_P = tl.exp(high_P - top)
    total = tl.sum(total_P * weight_P, 0)
    out_V = tl.sum(found_PV * weight_P[:, None], 0)
    for first in range(BP, SPLITS, BP):
        at, inside = here + first, first + p < SPLITS
        high_P = tl.load(stats_ptr + at, mask=inside, other=float("-inf"))
        total_P = tl.load(stats_ptr + stat_stride + at, mask=inside, other=0.0)
        found_PV = tl.load(
            found_ptr + at[:, None] * DV + out_dims[None, :], mask=inside[:, None], other=0.0
        )
        weight_P = tl.exp(high_P - top)
        total += tl.sum(total_P * weight_P, 0)
        out_V += tl.sum(found_PV * weight_P[:, None], 0)
    if SINKS:
        total += tl.exp(sink - top)
    out_V = out_V / total
    tl.store(out_ptr + row * DV + out_dims, out_V.to(out_ptr.dtype.element_ty))
