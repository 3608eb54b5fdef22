"""From the projections of one token per sequence to its attention, in one launch or a few.

    rope_attention_kernel    a sequence and a head of the cache: the query heads that share it and
                             the new key normed and turned, key and value put into their slot,
                             attention

What is in the cache was there before the launch before this one, so all of it is asked for while
that one runs: of a short cache nothing is then left to wait for but the projections. A cache that
shared memory does not hold takes the launch of rope.py and those of one_query.py; that of one
sequence, on Hopper, the kernel of rope_attention_gluon.py: registers of its programs hold the keys,
and where several share a head a launch merges what they found.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.decode import one_query, rope
from moe_ops.kernels.triton.decode.one_query import least_of, mask_at
from moe_ops.kernels.triton.decode.rope import turned
from moe_ops.kernels.triton.launch import (
    is_hopper,
    on_its_device,
    pdl_options,
    shared_memory,
)
from moe_ops.kernels.triton.replay import launch

MOST_BYTES = 128 * 1024  # of keys and values of a head
OTHER_BYTES = 16 * 1024  # of shared memory, for what else a program holds there
WIDE = 128  # a head from which on tiles are larger, and eight warps share them
ALONE = 256  # slots of a head up to which one program has all of them
OF_A_PART = 128  # slots of a program where several share a head
MOST_PARTS = 32


@on_its_device
def run(
    q_BHD: Tensor,
    k_BND: Tensor,
    v_BND: Tensor,
    cos_BW: Tensor,
    sin_BW: Tensor,
    slot: Tensor,
    keys_BNSD: Tensor,
    values_BNSD: Tensor,
    mask_BS: Tensor,
    scale: float,
    q_gain_D: Tensor | None,
    k_gain_D: Tensor | None,
    eps: float,
    sinks_H: Tensor | None,
    *,
    invariant: bool = False,
) -> Tensor:
    """The op `rope_attention` of arguments that its `refusal` lets pass; of an invariant call as
    `one_query` says."""
    tensors = (q_BHD, k_BND, v_BND, cos_BW, sin_BW, slot, keys_BNSD, values_BNSD)
    (B, H, D), (N, slots, DV) = q_BHD.shape, values_BNSD.shape[1:]
    rest = (mask_BS, scale, q_gain_D, k_gain_D, eps, sinks_H)
    if not invariant and B == 1 and is_hopper(q_BHD) and fits_registers(H // N, slots, D, DV):
        return run_short(*tensors, *rest)
    wide = D >= WIDE
    BS = min(128 if wide else 64, max(16, triton.next_power_of_2(slots) // 2))
    tiles = triton.cdiv(slots, BS)
    held = tiles * BS * (D + DV) * q_BHD.element_size()
    if invariant or held > min(MOST_BYTES, shared_memory(q_BHD) - OTHER_BYTES):
        turned_BHD = rope.run(*tensors, q_gain_D, k_gain_D, eps)
        held_in = (keys_BNSD, values_BNSD, mask_BS, scale, sinks_H)
        return one_query.attend(turned_BHD, *held_in, invariant=invariant)
    out_BHV = q_BHD.new_empty(B, H, DV)
    launch(
        rope_attention_kernel, (B * N,),
        *tensors, q_gain_D, k_gain_D, mask_BS, sinks_H, out_BHV, mask_BS.stride(0),
        N=N, G=H // N, BG=max(16, triton.next_power_of_2(H // N)), S=slots,
        BS=BS, BL=triton.next_power_of_2(slots), TILES=tiles, D=D, DV=DV,
        W=cos_BW.shape[1], ROWS=cos_BW.shape[0], EPS=eps, SCALE=scale,
        LEAST=least_of(mask_BS), num_warps=8 if wide else 4, **pdl_options(q_BHD),
    )  # fmt: skip
    return out_BHV


def fits_registers(group: int, slots: int, D: int, DV: int) -> bool:
    """Whether `run_short` is for heads of such sizes, a group of queries of each, and a cache of so
    many slots, whose keys the registers of a few programs hold."""
    return group <= 16 and slots <= MOST_PARTS * OF_A_PART and D in (64, 128) and DV in (64, 128)


def run_short(
    q_BHD: Tensor, k_BND: Tensor, v_BND: Tensor, cos_BW: Tensor, sin_BW: Tensor, slot: Tensor,
    keys_BNSD: Tensor, values_BNSD: Tensor, mask_BS: Tensor, scale: float,
    q_gain_D: Tensor | None, k_gain_D: Tensor | None, eps: float, sinks_H: Tensor | None,
) -> Tensor:  # fmt: skip
    """`run` on Hopper for what `fits_registers`. Of one sequence with up to ALONE slots it was
    faster on an H200 than the launch of any cache that shared memory holds, of eight slower. What
    programs that share a head take is not measured."""
    from moe_ops.kernels.triton.decode import rope_attention_gluon as kernels

    (B, H, D), (N, slots, DV) = q_BHD.shape, values_BNSD.shape[1:]
    out_BHV = q_BHD.new_empty(B, H, DV)
    span = ALONE if OF_A_PART < slots <= ALONE else OF_A_PART
    parts = triton.cdiv(slots, span)
    found, stats, sinks = out_BHV, None, sinks_H
    if parts > 1:
        found, stats = one_query.room_for_parts(out_BHV, parts)
        sinks = None  # the merge adds them
    launch(
        kernels.rope_attention_short, (B * N * parts,),
        q_BHD, k_BND, v_BND, cos_BW, sin_BW, slot, keys_BNSD, values_BNSD, q_gain_D, k_gain_D,
        mask_BS, sinks, found, stats, mask_BS.stride(0), B * H * parts,
        N=N, G=H // N, HEADS=8 if H // N <= 8 else 16, SLOTS=slots,
        C=span // kernels.SHARES.value, PARTS=parts, D=D, DV=DV, W=cos_BW.shape[1],
        ROWS_OF_ANGLES=cos_BW.shape[0], EPS=eps, SCALE=scale, LEAST=least_of(mask_BS),
        num_warps=kernels.SHARES.value, **pdl_options(q_BHD),
    )  # fmt: skip
    if stats is not None:
        one_query.merge(found, stats, out_BHV, sinks_H)
    return out_BHV


@triton.jit
def rope_attention_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slot_ptr, keys_ptr, values_ptr,
    q_gain_ptr, k_gain_ptr, mask_ptr, sinks_ptr, out_ptr, mask_stride,
    N: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, S: tl.constexpr, BS: tl.constexpr,
    BL: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a sequence and a head of the cache, with all its slots.

    The loop has a stage for every tile, so that all of them are asked for ahead of its first turn;
    that is where the wait for the projections is.
    """
    pair = tl.program_id(0).to(tl.int64)
    b = pair // N
    keys_ptr += pair * S * D
    values_ptr += pair * S * DV
    mask_ptr += b * mask_stride
    if ROWS > 1:
        cos_ptr += b * W
        sin_ptr += b * W
    d_D, d_V, rows_G = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, BG)
    head_G = pair * G + tl.minimum(rows_G, G - 1)  # rows behind the last are the last
    q_gain_D, q_other_D, k_gain_D, k_other_D = 0.0, 0.0, 0.0, 0.0
    if q_gain_ptr is not None:
        other_D = (d_D + D // 2) % D
        q_gain_D, q_other_D = tl.load(q_gain_ptr + d_D), tl.load(q_gain_ptr + other_D)
        k_gain_D, k_other_D = tl.load(k_gain_ptr + d_D), tl.load(k_gain_ptr + other_D)
    slot = tl.load(slot_ptr)
    every_L = tl.arange(0, BL)
    seen_L = mask_at(mask_ptr, every_L, (every_L < S) & (every_L != slot), LEAST) > float("-inf")
    end = tl.max(tl.where(seen_L, every_L + 1, 0))
    new_G = mask_at(mask_ptr, slot + 0 * rows_G, rows_G >= 0, LEAST)

    q_GD = tl.zeros((BG, D), q_ptr.dtype.element_ty)
    new_V = tl.zeros((DV,), v_ptr.dtype.element_ty)
    high_G = tl.full((BG,), float("-inf"), tl.float32)
    total_G = tl.zeros((BG,), tl.float32)
    acc_GV = tl.zeros((BG, DV), tl.float32)
    at_S = tl.arange(0, BS)
    added_S = mask_at(mask_ptr, at_S, (at_S < end) & (at_S != slot), LEAST)
    for tile in tl.range(0, TILES, num_stages=TILES + 1):
        at_S = tile * BS + tl.arange(0, BS)
        # What is behind the last slot in use may be no number.
        here_S = (at_S < end) & (at_S != slot)
        keys_SD = tl.load(
            keys_ptr + at_S[:, None] * D + d_D[None, :], mask=here_S[:, None], other=0.0
        )
        values_SV = tl.load(
            values_ptr + at_S[:, None] * DV + d_V[None, :], mask=here_S[:, None], other=0.0
        )
        ahead_S = at_S + BS
        following_S = mask_at(mask_ptr, ahead_S, (ahead_S < end) & (ahead_S != slot), LEAST)
        if tile == 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
            new_V = tl.load(v_ptr + pair * DV + d_V)  # first, so that all loads wait at once
            q_GD = turned(
                q_ptr + (head_G * D)[:, None], q_gain_ptr, q_gain_D, q_other_D,
                cos_ptr, sin_ptr, D, W, EPS,
            )  # fmt: skip
            # The new key, in every row.
            new_GD = turned(
                k_ptr + (pair * D + 0 * rows_G)[:, None], q_gain_ptr, k_gain_D, k_other_D,
                cos_ptr, sin_ptr, D, W, EPS,
            )  # fmt: skip
            at_GD = slot * D + d_D[None, :] + 0 * rows_G[:, None]
            tl.store(keys_ptr + at_GD, new_GD, mask=rows_G[:, None] == 0)
            tl.store(values_ptr + slot * DV + d_V, new_V)
            new_G += tl.sum(q_GD.to(tl.float32) * new_GD.to(tl.float32), 1) * SCALE
            high_G = new_G
            total_G += 1.0
            acc_GV += new_V.to(tl.float32)[None, :]
            if PDL:  # not before: what the next launch prefetches would be in the way
                tl.extra.cuda.gdc_launch_dependents()
        scores_GS = tl.dot(q_GD, tl.trans(keys_SD)) * SCALE + added_S[None, :]
        top_G = tl.maximum(high_G, tl.max(scores_GS, 1))
        # Where no slot is seen yet -inf remains, and -inf minus -inf is no number.
        safe_G = tl.where(top_G == float("-inf"), 0.0, top_G)
        p_GS = tl.exp(scores_GS - safe_G[:, None])
        shrink_G = tl.exp(high_G - safe_G)
        total_G = total_G * shrink_G + tl.sum(p_GS, 1)
        p_GS = p_GS.to(values_SV.dtype)
        acc_GV = acc_GV * shrink_G[:, None] + tl.dot(p_GS, values_SV)
        high_G, added_S = top_G, following_S
    if sinks_ptr is not None:
        sink_G = tl.load(sinks_ptr + head_G - b * N * G).to(tl.float32)
        top_G = tl.maximum(high_G, sink_G)
        shrink_G = tl.exp(high_G - top_G)
        total_G = total_G * shrink_G + tl.exp(sink_G - top_G)
        acc_GV = acc_GV * shrink_G[:, None]
    tl.store(
        out_ptr + (head_G * DV)[:, None] + d_V[None, :],
        (acc_GV / total_G[:, None]).to(out_ptr.dtype.element_ty),
        mask=rows_G[:, None] < G,
    )
