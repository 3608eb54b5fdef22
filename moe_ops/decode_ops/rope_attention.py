"""From the projections of one token per sequence to its attention; `passes/fuse_rope.py` puts it
into graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import DOUBLE, wide
from moe_ops.decode_ops.one_query import OneQueryCall, one_query
from moe_ops.decode_ops.one_query import refusal as refusal_of_one_query
from moe_ops.kernels.triton.decode.one_query_plan import power_of_two
from moe_ops.registry.spec import DECODE_OPS, op

DTYPES = (torch.bfloat16, torch.float16)  # and float64, by the definition


@dataclass(slots=True)
class RopeAttentionCall:
    """The arguments of `rope_attention`, which writes to a slot of both caches."""

    q_BHD: Tensor
    k_BND: Tensor
    v_BND: Tensor
    cos_BW: Tensor
    sin_BW: Tensor
    slot: Tensor
    keys_BNSD: Tensor
    values_BNSD: Tensor
    mask_BS: Tensor
    scale: float
    q_gain_D: Tensor | None = None
    k_gain_D: Tensor | None = None
    eps: float = 0.0
    sinks_H: Tensor | None = None

    MUTATED: ClassVar[tuple[str, ...]] = ("keys_BNSD", "values_BNSD")


def attention(call: RopeAttentionCall, q_BHD: Tensor) -> OneQueryCall:
    """What is left once the query is turned and the caches are written."""
    return OneQueryCall(
        q_BHD, call.keys_BNSD, call.values_BNSD, call.mask_BS, call.scale, call.sinks_H
    )


def refusal(call: RopeAttentionCall) -> str | None:
    """Why these are no arguments of `rope_attention`, or None."""
    q_BHD, keys_BNSD, values_BNSD = call.q_BHD, call.keys_BNSD, call.values_BNSD
    cos_BW, slot = call.cos_BW, call.slot
    if q_BHD.dim() != 3 or keys_BNSD.dim() != 4 or values_BNSD.dim() != 4:
        got = f"q is {list(q_BHD.shape)}, not [B, H, D]"
        return f"{got}; or the caches are no [B, N, S, D]; reshape them"
    (B, _, D), N, (slots, DV) = q_BHD.shape, keys_BNSD.shape[1], values_BNSD.shape[2:]
    for size in (D, DV):
        if not 16 <= size <= 256 or size != power_of_two(size):
            return f"heads of {size}, no power of two from 16 to 256; use torch's attention"
    if q_BHD.dtype not in (*DTYPES, DOUBLE):
        return f"q is {q_BHD.dtype}, not bfloat16 or float16; use torch's attention"
    if slot.shape != (1,) or slot.dtype != torch.int64:
        return f"the slot is {slot.dtype} {list(slot.shape)}, not an int64 [1]; convert it"
    if (call.q_gain_D is None) != (call.k_gain_D is None):
        return "one of q and k has a gain, the other has none; give both or neither"
    rows, width = cos_BW.shape if cos_BW.dim() == 2 else (0, 0)
    if rows not in (1, B) or width not in (D, D // 2):
        wanted = f"[1 or {B}, {D} or {D // 2}]"
        return f"the angles are {list(cos_BW.shape)}, not {wanted}; reshape them"
    for what, t, shape in (
        ("q", q_BHD, q_BHD.shape),
        ("k", call.k_BND, (B, N, D)),
        ("v", call.v_BND, (B, N, DV)),
        ("cos", cos_BW, cos_BW.shape),
        ("sin", call.sin_BW, cos_BW.shape),
        ("cache of keys", keys_BNSD, (B, N, slots, D)),
        ("cache of values", values_BNSD, (B, N, slots, DV)),
        ("gain of q", call.q_gain_D, (D,)),
        ("gain of k", call.k_gain_D, (D,)),
    ):
        if t is None:
            continue
        if t.shape != shape or not t.is_contiguous():
            got = f"{list(t.shape)} with the strides {t.stride()}"
            return f"the {what} is {got}, not a contiguous {list(shape)}; reshape it"
        if (t.dtype, t.device) != (q_BHD.dtype, q_BHD.device) or slot.device != t.device:
            return (
                f"the {what} is {t.dtype} on {t.device}, q {q_BHD.dtype} on {q_BHD.device}; "
                "convert one of them"
            )
    return refusal_of_one_query(attention(call, q_BHD))


def check(call: RopeAttentionCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"rope_attention: {reason}")


@op(check=check, table=DECODE_OPS)
def rope_attention(call: RopeAttentionCall) -> Tensor:
    """`one_query` of the heads of q turned by their position, after those of k, turned too, and of
    v went into a slot of the cache. Each half of a head of size D is turned against the other:

        turned(x) = x cos + [-x₂, x₁] sin    for x = [x₁, x₂]

    with angles of W = D numbers, or of W = D / 2 for both halves, the same for all sequences if
    there is one row of them. If there are gains, x is first gain (x / sqrt(mean(x²) + eps)), with
    the quotient and x rounded; turned heads are rounded.

    On a GPU it is one launch for a short cache, two or three for others. The first may read the
    cache, the slot, the mask, the gains and the sinks ahead of the end of the launch before: what
    writes them must have ended two launches ago. Raises ValueError for what `refusal` names.
    """
    k_BND = _turned(call.k_BND, call.k_gain_D, call)
    call.keys_BNSD.index_copy_(2, call.slot, k_BND[:, :, None])
    call.values_BNSD.index_copy_(2, call.slot, call.v_BND[:, :, None])
    return one_query.body(attention(call, _turned(call.q_BHD, call.q_gain_D, call)))


def _turned(x: Tensor, gain: Tensor | None, call: RopeAttentionCall) -> Tensor:
    turned = wide(x)
    if gain is not None:
        quotient = turned * torch.rsqrt(turned.pow(2).mean(-1, keepdim=True) + call.eps)
        turned = wide(gain * quotient.to(x.dtype))
    first, second = turned.chunk(2, -1)
    repeat = x.shape[-1] // call.cos_BW.shape[-1]
    cos, sin = (wide(t).repeat(1, repeat)[:, None] for t in (call.cos_BW, call.sin_BW))
    return (turned * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


rope_attention.fake(fake_impls.rope_attention)
