"""Backends of a decoding step's ops in PyTorch's own operators, for CPUs."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from moe_ops.decode_ops.one_query_latents import OneQueryLatentsCall, added, one_query_latents
from moe_ops.registry.gradients import grad_wanted
from moe_ops.registry.invariance import INVARIANT


def supports_latents(call: OneQueryLatentsCall) -> str | None:
    """Why the slots that are seen cannot be counted, or None."""
    given = tuple(getattr(call, field.name) for field in fields(call))
    if grad_wanted(given, {}):
        return "is not differentiable, and an argument requires grad"
    return None


@one_query_latents.backend(
    "aten",
    reads=one_query_latents.optional,
    supports=supports_latents,
    devices=("cpu",),
    priority=1,
    arithmetic=lambda call: "by sequence",
)
def attend_filled(call: OneQueryLatentsCall) -> Tensor:
    """`one_query_latents` that reads only slots which are seen, one sequence after the other: a
    buffer of thousands of slots costs no more than what is in it, and products are of the same
    sizes whatever else is in the batch."""
    out_BHR = torch.empty(call.q_BHR.shape, dtype=call.q_BHR.dtype)
    sinks_H1 = None if call.sinks_H is None else call.sinks_H.float()[:, None]
    shared = len(call.q_BHR) // len(call.latents_BSR)
    heads_H = torch.arange(call.q_BHR.shape[1])
    for b in range(len(call.q_BHR)):
        latents_SR, rotated_SD = call.latents_BSR[b // shared], call.rotated_BSD[b // shared]
        at_S, added_S = _seen(call, b)
        latents_SR, rotated_SD = _rows(latents_SR, at_S), _rows(rotated_SD, at_S)
        q_HR, q_rope_HD = (_rows(q[b], heads_H) for q in (call.q_BHR, call.q_rope_BHD))
        scores_HS = q_HR @ latents_SR.T + q_rope_HD @ rotated_SD.T
        scores_HS = scores_HS * call.scale + added_S
        if sinks_H1 is not None:
            scores_HS = torch.cat([scores_HS, sinks_H1], 1)
        out_BHR[b] = scores_HS.softmax(-1)[:, : len(at_S)] @ latents_SR
    return out_BHR


def _seen(call: OneQueryLatentsCall, b: int) -> tuple[Tensor, Tensor]:
    """The slots that a sequence sees, and what the mask adds to their scores."""
    mask_S = call.mask_BS[b]
    if call.indices_BC is None:
        hides = mask_S.dtype == torch.bool
        at_S = (mask_S if hides else added(mask_S) > float("-inf")).nonzero()[:, 0]
        return at_S, added(mask_S[at_S])
    at_S = call.indices_BC[b]
    at_S = at_S[(at_S >= 0) & (at_S < len(mask_S))].long()
    added_S = added(mask_S[at_S])
    seen_S = added_S > float("-inf")
    return at_S[seen_S], added_S[seen_S]


def _rows(x_SK: Tensor, at_S: Tensor) -> Tensor:
    """Rows in float32; a view of float32 where they are a run, unless a call has to be batch
    invariant: how libraries sum may depend on where in its memory a tensor begins."""
    n = len(at_S)
    if (
        n
        and not INVARIANT.get()
        and int(at_S[-1]) - int(at_S[0]) == n - 1
        and bool((at_S.diff() == 1).all())
    ):
        first = int(at_S[0])
        return x_SK[first : first + n].float()
    return x_SK[at_S].float()
