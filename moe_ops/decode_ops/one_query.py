"""Attention of one query token per sequence; `moe_ops/generation/one_query.py` calls it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import DOUBLE, FLOATS_OR_DOUBLE, wide
from moe_ops.kernels.triton.decode.one_query_plan import MOST_SLOTS, power_of_two
from moe_ops.registry.spec import DECODE_OPS, op


@dataclass(slots=True)
class OneQueryCall:
    """The arguments of `one_query`."""

    q_BHD: Tensor
    k_BNSD: Tensor
    v_BNSD: Tensor
    mask_BS: Tensor
    scale: float
    sinks_H: Tensor | None = None


def refusal(call: OneQueryCall) -> str | None:
    """Why these are no arguments of `one_query`, or None."""
    q_BHD, k_BNSD, v_BNSD = call.q_BHD, call.k_BNSD, call.v_BNSD
    mask_BS, sinks_H = call.mask_BS, call.sinks_H
    if (q_BHD.dim(), k_BNSD.dim(), v_BNSD.dim()) != (3, 4, 4):
        shapes = _shapes(q_BHD, k_BNSD, v_BNSD)
        return f"q, k and v are {shapes}, not [B, H, D] and [B, N, S, D]; reshape them"
    (B, H, D), (C, N, slots, DV) = q_BHD.shape, v_BNSD.shape
    if k_BNSD.shape != (C, N, slots, D) or 0 in (C, N) or B % C or H % N:
        return (
            f"q, k and v of {_shapes(q_BHD, k_BNSD, v_BNSD)} do not fit each other; give them one "
            "S, q and k one D, k and v one B that divides that of q, and an N that divides H"
        )
    if slots > MOST_SLOTS:
        return f"has {slots} slots, more than {MOST_SLOTS}; use torch's attention"
    for size in (D, DV):
        if not 16 <= size <= 256 or size != power_of_two(size):
            return f"heads of {size}, no power of two from 16 to 256; use torch's attention"
    if q_BHD.dtype not in FLOATS_OR_DOUBLE or not q_BHD.dtype == k_BNSD.dtype == v_BNSD.dtype:
        dtypes = f"{q_BHD.dtype}, {k_BNSD.dtype} and {v_BNSD.dtype}"
        return f"{dtypes} are not one of float32, bfloat16, float16; convert them"
    if not q_BHD.is_contiguous():
        return f"the query has the strides {q_BHD.stride()}; make it contiguous"
    if not (k_BNSD.is_contiguous() and v_BNSD.is_contiguous()):
        return "the cache is a view with other strides; make it contiguous"
    if mask_BS.shape != (B, slots) or not (mask_BS.dtype.is_floating_point or _hides(mask_BS)):
        got = f"{mask_BS.dtype} {list(mask_BS.shape)}"
        return f"the mask is {got}, not of {B} x {slots} slots; give bools or floats of that shape"
    if mask_BS.stride(1) != 1:
        return f"the mask has the strides {mask_BS.stride()}; make its rows contiguous"
    if sinks_H is not None and (sinks_H.shape != (H,) or not sinks_H.is_contiguous()):
        return f"the sinks are {list(sinks_H.shape)}, not a contiguous [{H}]; give one a head"
    reason = mixed(q_BHD, mask_BS, sinks_H)
    if reason is not None:
        return reason
    for t in (k_BNSD, v_BNSD, mask_BS, *([] if sinks_H is None else [sinks_H])):
        if t.device != q_BHD.device:
            return f"the query is on {q_BHD.device}, something else on {t.device}; move one of them"
    return None


def mixed(q: Tensor, mask_BS: Tensor, sinks_H: Tensor | None) -> str | None:
    """Why a mask of floats or sinks mix float64 with the other floats of the query, or None."""
    for what, t in (("mask is", mask_BS), ("sinks are", sinks_H)):
        if t is None or not t.is_floating_point() or t.dtype is q.dtype:
            continue
        if DOUBLE in (t.dtype, q.dtype):
            return f"the {what} {t.dtype}, the query {q.dtype}; convert one of them"
    return None


def _hides(mask_BS: Tensor) -> bool:
    return mask_BS.dtype == torch.bool


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)


def check(call: OneQueryCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"one_query: {reason}")


@op(check=check, table=DECODE_OPS)
def one_query(call: OneQueryCall) -> Tensor:
    """out[b, h] = Σ_s p[s] v[b, n(h), s], where p is softmax over the slots s of

        q[b, h] · k[b, n(h), s] scale + mask[b, s]

    and, if there are sinks, of one more logit, whose share adds nothing. H / N heads share a key.
    A mask of bool hides what is False; one of floats is added, and on a GPU hides what is less than
    half of the least number of its type. Without sinks, some slot of each query is not hidden. If k
    and v are of fewer sequences than q, so many queries in a row share one that it comes out even.
    On a GPU it is one launch or two. Raises ValueError for what `refusal` names.
    """
    return formula(
        call.q_BHD, call.k_BNSD, call.v_BNSD, call.mask_BS, call.scale, call.sinks_H
    )  # fmt: skip


def formula(
    q_BHD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    mask_BS: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """What `one_query` computes, of any sizes, strides and dtypes, in torch's own ops."""
    (B, H, D), (C, N, slots, DV) = q_BHD.shape, v_BNSD.shape
    W, G = B // C, H // N  # queries of a sequence, heads that share a key
    grouped = q_BHD.reshape(B, N, G, D) * scale
    mask = mask_BS[:, None, None]
    if W > 1:  # the queries of a sequence are rows of one product, as the heads are
        grouped = grouped.unflatten(0, (C, W)).transpose(1, 2).flatten(2, 3)
        mask = mask_BS.reshape(C, 1, W, 1, slots).expand(-1, -1, -1, G, -1).flatten(2, 3)
    scores = wide(grouped @ k_BNSD.transpose(2, 3))  # [C, N, W * G, slots]
    hides = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, float("-inf")) if hides else scores + mask
    if sinks_H is not None:
        sink = wide(sinks_H).reshape(1, N, 1, G, 1).expand(C, -1, W, -1, -1).flatten(2, 3)
        scores = torch.cat([scores, sink], -1)
    out = scores.softmax(-1)[..., :slots].to(v_BNSD.dtype) @ v_BNSD
    if W > 1:
        out = out.unflatten(2, (W, G)).transpose(1, 2)
    return out.reshape(B, H, DV)


one_query.fake(fake_impls.one_query)
