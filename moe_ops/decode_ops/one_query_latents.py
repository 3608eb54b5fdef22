"""Attention of one query token per sequence over latents that all heads share;
`moe_ops/generation/latents.py` calls it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import FLOATS_OR_DOUBLE, INDICES, wide
from moe_ops.decode_ops.one_query import mixed
from moe_ops.registry.spec import DECODE_OPS, op


@dataclass(slots=True)
class OneQueryLatentsCall:
    """The arguments of `one_query_latents`."""

    q_BHR: Tensor
    q_rope_BHD: Tensor
    latents_BSR: Tensor
    rotated_BSD: Tensor
    mask_BS: Tensor
    scale: float
    sinks_H: Tensor | None = None
    indices_BC: Tensor | None = None


def refusal(call: OneQueryLatentsCall) -> str | None:
    """Why these are no arguments of `one_query_latents`, and what to do, or None."""
    queries = {"q": call.q_BHR, "the rotated part of q": call.q_rope_BHD}
    caches = {"latents": call.latents_BSR, "rotated keys": call.rotated_BSD}
    for what, t in (queries | caches).items():
        if t.dim() != 3:
            return f"{what} must have 3 axes, got {list(t.shape)}; reshape it"
    (B, H, R), (C, slots, D) = call.q_BHR.shape, call.rotated_BSD.shape
    if call.q_rope_BHD.shape != (B, H, D) or call.latents_BSR.shape != (C, slots, R):
        shapes = ", ".join(str(list(t.shape)) for t in (queries | caches).values())
        return f"{shapes} do not fit each other; give [B, H, R], [B, H, D], [B, S, R], [B, S, D]"
    if 0 in (B, H, C, R, slots) or B % C:
        shapes = ", ".join(str(list(t.shape)) for t in (queries | caches).values())
        wanted = "give a B of latents that divides that of q, and some of each"
        return f"{shapes} have other batches, or none of something; {wanted}"
    dtypes = {t.dtype for t in (queries | caches).values()}
    if len(dtypes) != 1 or call.q_BHR.dtype not in FLOATS_OR_DOUBLE:
        got = ", ".join(sorted(map(str, dtypes)))
        return f"{got} is not one of float32, bfloat16, float16; convert them to one of these"
    for what, t in queries.items():
        if t.stride(2) != 1:
            return f"{what} has the strides {t.stride()}; make its rows contiguous"
    for what, t in caches.items():
        if not t.is_contiguous():
            return f"{what} are a view with other strides; make them contiguous"
    return _refusal_of_others(call, B, H, slots)


def _refusal_of_others(call: OneQueryLatentsCall, B: int, H: int, slots: int) -> str | None:
    mask_BS, sinks_H, indices_BC = call.mask_BS, call.sinks_H, call.indices_BC
    hides = mask_BS.dtype == torch.bool or mask_BS.dtype.is_floating_point
    if mask_BS.shape != (B, slots) or not hides:
        got = f"{mask_BS.dtype} {list(mask_BS.shape)}"
        return f"the mask is {got}, not of {B} x {slots} slots; give bools or floats of that shape"
    if mask_BS.stride(1) != 1:
        return f"the mask has the strides {mask_BS.stride()}; make its rows contiguous"
    if sinks_H is not None and (sinks_H.shape != (H,) or not sinks_H.is_contiguous()):
        return f"the sinks are {list(sinks_H.shape)}, not a contiguous [{H}]; give one a head"
    if indices_BC is not None:
        if indices_BC.dim() != 2 or len(indices_BC) != B or indices_BC.dtype not in INDICES:
            got = f"{indices_BC.dtype} {list(indices_BC.shape)}"
            return f"the indices are {got}; give int32 or int64 [{B}, C]"
        if indices_BC.shape[1] == 0 or indices_BC.stride(1) != 1:
            return "the indices are none, or rows that are not contiguous; give contiguous ones"
    for t in (call.q_rope_BHD, call.latents_BSR, call.rotated_BSD, mask_BS, sinks_H, indices_BC):
        if t is not None and t.device != call.q_BHR.device:
            return f"q is on {call.q_BHR.device}, something else on {t.device}; move one of them"
    return mixed(call.q_BHR, mask_BS, sinks_H)


def check(call: OneQueryLatentsCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"one_query_latents: {reason}")


@op(check=check, table=DECODE_OPS)
def one_query_latents(call: OneQueryLatentsCall) -> Tensor:
    """out[b, h] = Σ_s p[s] latents[b, s], where p is softmax over the slots s of

        (q[b, h] · latents[b, s] + q_rope[b, h] · rotated[b, s]) scale + mask[b, s]

    and, if there are sinks [H], of one more logit, whose share adds nothing. Queries are [B, H, R]
    and [B, H, D], with rows that may lie apart, latents [B, S, R] and rotated keys [B, S, D], where
    D may be 0; the result is [B, H, R]. So a query times the first part of an expanding weight
    attends to latents as they are, and the result times its other part is the output.

    A mask of bool hides what is False; one of floats is added, and hides what is less than half of
    the least number of its type. With indices [B, C], all different, only the slots that they
    choose are seen, and of these what the mask shows; those beyond S choose none. Without sinks,
    some slot of each sequence is seen. Sums are in float32. What is in hidden slots behind the last
    that is seen does not matter if they are not chosen, and a sequence has the same result whatever
    others see. If latents are of fewer sequences than q, so many queries in a row share one that it
    comes out even. On a GPU it is two launches. Raises ValueError for what `refusal` names.
    """
    q_BHR, latents_BSR, rotated_BSD = call.q_BHR, call.latents_BSR, call.rotated_BSD
    added_BS = added(call.mask_BS)
    latents_BSR, rotated_BSD = (of_each(x, len(q_BHR)) for x in (latents_BSR, rotated_BSD))
    if call.indices_BC is not None:
        slots = latents_BSR.shape[1]
        inside_BC = (call.indices_BC >= 0) & (call.indices_BC < slots)
        at_BC = call.indices_BC.clamp(0, slots - 1).long()
        latents_BSR = latents_BSR.take_along_dim(at_BC[..., None], 1)
        rotated_BSD = rotated_BSD.take_along_dim(at_BC[..., None], 1)
        added_BS = added_BS.gather(1, at_BC).masked_fill(~inside_BC, float("-inf"))
    hidden_BS = added_BS == float("-inf")
    wide_BSR = wide(latents_BSR).masked_fill(hidden_BS[..., None], 0.0)
    keys_BSK = torch.cat([wide_BSR, wide(rotated_BSD)], -1)
    scores = wide(torch.cat([q_BHR, call.q_rope_BHD], -1)) @ keys_BSK.transpose(1, 2)
    scores = (scores * call.scale).masked_fill(hidden_BS[:, None], 0.0) + added_BS[:, None]
    if call.sinks_H is not None:
        sink = wide(call.sinks_H)[None, :, None].expand(scores.shape[0], -1, 1)
        scores = torch.cat([scores, sink], -1)
    return (scores.softmax(-1)[..., : wide_BSR.shape[1]] @ wide_BSR).to(q_BHR.dtype)


def of_each(x_BSK: Tensor, queries: int) -> Tensor:
    """What a cache has for each query, of which as many in a row share a sequence."""
    shared = queries // len(x_BSK)
    return x_BSK if shared == 1 else x_BSK.repeat_interleave(shared, 0)


def added(mask: Tensor) -> Tensor:
    """What a mask adds to scores, in float32 or float64: -inf to what it hides."""
    if mask.dtype == torch.bool:
        seen = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        return seen.masked_fill(~mask, float("-inf"))
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return wide(mask).masked_fill(hidden, float("-inf"))


one_query_latents.fake(fake_impls.one_query_latents)
