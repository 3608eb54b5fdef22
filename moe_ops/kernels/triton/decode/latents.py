"""Attention of one query per head over latents that all heads share, in two launches.

Heads are the rows of a tile, whose columns are slots; a tile of latents is read once, for both
products. Programs share the slots of a sequence:

    latents_kernel    of some heads of a sequence what a program found in its slots: the largest
                      score, the sum of the powers below it, and the latents weighted with these
    latents_merge     the output from what the programs found, in the order of the programs

On Hopper the kernel of `latents_hopper.py` takes the place of the first, for latents of 16 bits.

Of `SPLITS` programs each takes every `SPLITS`-th tile, so that a buffer which is filled up to some
slot is shared evenly, whatever its size. A program that sees no slot writes no more than that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.decode.latents_hopper import REGISTERS, latents_hopper_kernel
from moe_ops.kernels.triton.decode.latents_plan import (
    MOST_HEADS,
    HopperPlan,
    LatentsPlan,
    Sizes,
    fits_hopper,
    hopper_plan_for,
    plan_for,
)
from moe_ops.kernels.triton.decode.latents_slots import slots_at
from moe_ops.kernels.triton.decode.one_query import least_of
from moe_ops.kernels.triton.decode.one_query_plan import power_of_two
from moe_ops.kernels.triton.launch import (
    is_hopper,
    on_its_device,
    pdl_options,
    processors,
    shared_memory,
    take_turn,
)
from moe_ops.kernels.triton.replay import launch

LOG2_E = tl.constexpr(1 / math.log(2))
LEAST_MERGED = 128  # columns of a latent that a program merges
MOST_MERGED = 4096  # numbers that it holds, where these are more columns
LEAST_BT = 32  # with fewer tiles at once, the mask takes the registers of the products


@on_its_device
def attend(
    q_BHR: Tensor,
    q_rope_BHD: Tensor,
    latents_BSR: Tensor,
    rotated_BSD: Tensor,
    mask_BS: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
    indices_BC: Tensor | None = None,
    plan: LatentsPlan | HopperPlan | None = None,
) -> Tensor:
    """The op `one_query_latents` of arguments that its `refusal` lets pass, for latents and rotated
    keys of a power of two from 16 on."""
    (B, H, R), (_, slots, D) = q_BHR.shape, rotated_BSD.shape
    counted = slots if indices_BC is None else indices_BC.shape[1]
    if plan is None:
        plan = _plan(q_BHR, latents_BSR, rotated_BSD, counted)
    if isinstance(plan, HopperPlan):
        kernel: Any = latents_hopper_kernel
        own = {"STAGES": plan.stages, "num_warps": 4, "maxnreg": REGISTERS}
    else:
        kernel = latents_kernel
        # Between two tiles of what is chosen there is one of indices.
        stages = plan.stages if indices_BC is None else 2 * plan.stages - 1
        apart = plan.heads == MOST_HEADS
        own = {"APART": apart, "num_warps": plan.warps, "num_stages": stages}
    options = pdl_options(q_BHR)
    # An argument that a launch does not read is some tensor; it is not looked at.
    sinks = q_BHR if sinks_H is None else sinks_H
    indices = mask_BS if indices_BC is None else indices_BC
    shape = (B * H, plan.splits)
    found = torch.empty(*shape, R, dtype=torch.float32, device=q_BHR.device)
    stats = torch.empty(2, *shape, dtype=torch.float32, device=q_BHR.device)
    out = torch.empty(B, H, R, dtype=q_BHR.dtype, device=q_BHR.device)
    launch(
        kernel,
        (triton.cdiv(H, plan.heads), plan.splits, B),
        q_BHR,
        q_rope_BHD,
        latents_BSR,
        rotated_BSD,
        mask_BS,
        indices,
        found,
        stats,
        H,
        *q_BHR.stride()[:2],
        *q_rope_BHD.stride()[:2],
        mask_BS.stride(0),
        indices.stride(0),
        slots=slots,
        counted=counted,
        W=B // latents_BSR.shape[0],
        BH=plan.heads,
        R=R,
        D=D,
        BS=plan.tile,
        TILES=plan.tiles,
        BT=max(LEAST_BT, power_of_two(plan.tiles)),
        SPLITS=plan.splits,
        CHOSEN=indices_BC is not None,
        LEAST=least_of(mask_BS),
        SCALE=scale,
        **own,
        **options,
    )
    held = power_of_two(plan.splits)
    columns = min(R, max(LEAST_MERGED, MOST_MERGED // held))
    launch(
        latents_merge,
        (B * H, R // columns),
        found,
        stats,
        sinks,
        out,
        H,
        B * H * plan.splits,
        SPLITS=plan.splits,
        BP=held,
        R=R,
        BR=columns,
        SINKS=sinks_H is not None,
        num_warps=4,
        **options,
    )
    return out


def _plan(
    q_BHR: Tensor, latents_BSR: Tensor, rotated_BSD: Tensor, counted: int
) -> LatentsPlan | HopperPlan:
    """The plan of a call, for the GPU that the tensors are on."""
    (B, H, R), D = q_BHR.shape, rotated_BSD.shape[2]
    sizes = Sizes(B, H, counted, (R + D) * latents_BSR.element_size())
    memory = shared_memory(q_BHR)
    # The kernel for Hopper copies rows 16 bytes at a time.
    aligned = latents_BSR.data_ptr() % 16 == 0 and rotated_BSD.data_ptr() % 16 == 0
    if is_hopper(q_BHR) and aligned and fits_hopper(R, D, latents_BSR.element_size(), memory):
        return hopper_plan_for(sizes, processors(q_BHR))
    return plan_for(sizes, processors(q_BHR), memory)


@triton.jit
def weights(q, latents, scores, added, high, total, SCALE: tl.constexpr):
    """The powers of a tile's scores, in the dtype of the latents; the largest score and the sum of
    powers so far, and by how much what was found so far shrinks."""
    scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee")
    scores = scores * SCALE + (added * LOG2_E)[None, :]
    new = tl.maximum(high, tl.max(scores, 1))
    # Where no slot is seen yet -inf remains, and -inf minus -inf is no number.
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(high - safe)
    return p.to(latents.dtype), new, total * shrink + tl.sum(p, 1), shrink


@triton.jit
def latents_kernel(
    q_ptr, q_rope_ptr, latents_ptr, rotated_ptr, mask_ptr, indices_ptr, found_ptr, stats_ptr,
    H, q_row, q_head, rope_row, rope_head, mask_row, indices_row,
    slots: tl.constexpr, counted: tl.constexpr, W: tl.constexpr, BH: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BS: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, SPLITS: tl.constexpr,
    CHOSEN: tl.constexpr, APART: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a query, BH of its heads, every `SPLITS`-th tile of BS slots. W queries in a row
    share latents.

    The mask comes first: tiles before the first that it shows a slot of, and behind the last, are
    not read, nor are slots behind the last. Programs of the same slots are neighbours, of which the
    second finds what it reads in the cache of the GPU.
    """
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * BH + tl.arange(0, BH)
    r, d, entries, tiles = (
        tl.arange(0, R),
        tl.arange(0, max(D, 1)),
        tl.arange(0, BS),
        tl.arange(0, BT),
    )
    q_ptr += b * q_row
    q_rope_ptr += b * rope_row
    mask_ptr += b * mask_row
    indices_ptr += b * indices_row
    latents_ptr += b // W * slots * R
    rotated_ptr += b // W * slots * D
    high = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, R), tl.float32)
    take_turn(PDL)
    here = head[:, None] < H
    q = tl.load(q_ptr + head[:, None] * q_head + r[None, :], mask=here, other=0.0)
    q_rope = q
    if D > 0:
        q_rope = tl.load(q_rope_ptr + head[:, None] * rope_head + d[None, :], mask=here, other=0.0)
    own = (tiles[:, None] * SPLITS + split) * BS + entries[None, :]
    own = tl.where(tiles[:, None] < TILES, own, counted)
    _, shown = slots_at(indices_ptr, mask_ptr, own, slots, counted, CHOSEN, LEAST)
    seen = shown > float("-inf")
    ends = tl.max(tl.where(seen, own + 1, 0), 1)
    end = tl.max(ends, 0)  # of the entries
    last = tl.max(tl.where(ends > 0, tiles + 1, 0), 0)
    first = tl.min(tl.where(ends > 0, tiles, last), 0)
    p, shrink = tl.zeros((BH, BS), q.dtype), tl.full((BH,), 1.0, tl.float32)
    for tile in range(first, last):
        entry = (tile * SPLITS + split) * BS + entries
        at, added = slots_at(indices_ptr, mask_ptr, entry, slots, counted, CHOSEN, LEAST)
        read = entry[:, None] < end
        latents = tl.load(latents_ptr + at[:, None] * R + r[None, :], mask=read, other=0.0)
        rotated = latents
        if D > 0:
            rotated = tl.load(rotated_ptr + at[:, None] * D + d[None, :], mask=read, other=0.0)
        scores = tl.zeros((BH, BS), tl.float32)
        if APART:
            # Both conditions hold. To Triton what a branch gives is no chain of products, for which
            # it would have each of two warp groups compute all scores. Branches of one condition it
            # makes one: of what is chosen the addresses leave no registers for two.
            if D > 0 and (H if CHOSEN else rope_head) > 0:
                scores = tl.dot(q_rope, tl.trans(rotated), scores, input_precision="ieee")
            if H > 0:
                p, high, total, shrink = weights(
                    q, latents, scores, added, high, total, SCALE * LOG2_E
                )
        else:
            if D > 0:
                scores = tl.dot(q_rope, tl.trans(rotated), scores, input_precision="ieee")
            p, high, total, shrink = weights(q, latents, scores, added, high, total, SCALE * LOG2_E)
        acc = tl.dot(p, latents, acc * shrink[:, None], input_precision="ieee")

    place = head * SPLITS + split  # among those of the sequence
    stats_ptr += b * H * SPLITS
    tl.store(stats_ptr + place, high, mask=head < H)
    stats_ptr += tl.num_programs(2).to(tl.int64) * H * SPLITS
    tl.store(stats_ptr + place, total, mask=head < H)
    if last > 0:
        found_ptr += b * H * SPLITS * R
        tl.store(found_ptr + place[:, None] * R + r[None, :], acc, mask=here)


@triton.jit
def latents_merge(
    found_ptr, stats_ptr, sinks_ptr, out_ptr, H, stat_row,
    SPLITS: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BR columns of the output of a head, from what the programs found that saw a
    slot."""
    row = tl.program_id(0).to(tl.int64)
    p, r = tl.arange(0, BP), tl.program_id(1) * BR + tl.arange(0, BR)
    place = row * SPLITS + p
    take_turn(PDL)
    high_P = tl.load(stats_ptr + place, mask=p < SPLITS, other=float("-inf"))
    saw_P = high_P > float("-inf")
    total_P = tl.load(stats_ptr + stat_row + place, mask=saw_P, other=0.0)
    found_PR = tl.load(found_ptr + place[:, None] * R + r[None, :], mask=saw_P[:, None], other=0.0)
    top = tl.max(high_P, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + row % H).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    weight_P = tl.exp2(high_P - top)
    total = tl.sum(total_P * weight_P, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    out_R = tl.sum(found_PR * weight_P[:, None], 0) / total
    tl.store(out_ptr + row * R + r, out_R.to(out_ptr.dtype.element_ty))
