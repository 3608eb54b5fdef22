"""From the projections of one token per sequence to its attention, as one op; `passes/fuse_rope.py`
calls it.

No stage of a Mixture-of-Experts layer, so not in the registry of those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.decode_ops import one_query
from moe_ops.kernels.triton.decode.one_query_plan import power_of_two

DTYPES = (torch.bfloat16, torch.float16)


@torch.library.custom_op(
    "moe_ops::rope_attention",
    mutates_args=("keys_BNSD", "values_BNSD"),
    tags=(torch.Tag.needs_exact_strides,),
)
def rope_attention(
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
    q_gain_D: Tensor | None = None,
    k_gain_D: Tensor | None = None,
    eps: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`one_query` of the heads of q turned by their position, after those of k, turned too, and of
    v went into a slot of the cache. Each half of a head of size D is turned against the other:

        turned(x) = x cos + [-x₂, x₁] sin    for x = [x₁, x₂]

    with angles of W = D numbers, or of W = D / 2 for both halves, the same for all sequences if
    there is one row of them. If there are gains, x is first gain (x / sqrt(mean(x²) + eps)), with
    the quotient and x rounded; turned heads are rounded.

    On a GPU it is one launch for a short cache, two or three for others. The first may read the
    cache, the slot, the mask and the gains ahead of the end of the launch before: what writes them
    must have ended two launches ago. Raises ValueError for what `refusal` names.
    """
    before = (q_BHD, k_BND, v_BND, cos_BW, sin_BW, slot, keys_BNSD, values_BNSD, mask_BS)
    _check(*before, q_gain_D, k_gain_D, sinks_H)
    if q_BHD.is_cuda:
        from moe_ops.kernels.triton.decode.rope_attention import run

        return run(*before, scale, q_gain_D, k_gain_D, eps, sinks_H)
    keys_BNSD.index_copy_(2, slot, _turned(k_BND, cos_BW, sin_BW, k_gain_D, eps)[:, :, None])
    values_BNSD.index_copy_(2, slot, v_BND[:, :, None])
    q_BHD = _turned(q_BHD, cos_BW, sin_BW, q_gain_D, eps)
    return one_query.formula(q_BHD, keys_BNSD, values_BNSD, mask_BS, scale, sinks_H)


@rope_attention.register_fake
def _(
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
    q_gain_D: Tensor | None = None,
    k_gain_D: Tensor | None = None,
    eps: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    before = (q_BHD, k_BND, v_BND, cos_BW, sin_BW, slot, keys_BNSD, values_BNSD, mask_BS)
    _check(*before, q_gain_D, k_gain_D, sinks_H)
    return q_BHD.new_empty(*q_BHD.shape[:2], values_BNSD.shape[3])


def _turned(x: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    if gain is not None:
        quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        wide = (gain * quotient.to(x.dtype)).float()
    first, second = wide.chunk(2, -1)
    repeat = x.shape[-1] // cos.shape[-1]
    cos, sin = (t.float().repeat(1, repeat)[:, None] for t in (cos, sin))
    return (wide * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def refusal(
    q_BHD: Tensor,
    k_BND: Tensor,
    v_BND: Tensor,
    cos_BW: Tensor,
    sin_BW: Tensor,
    slot: Tensor,
    keys_BNSD: Tensor,
    values_BNSD: Tensor,
    mask_BS: Tensor,
    q_gain_D: Tensor | None = None,
    k_gain_D: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> str | None:
    """Why these are no arguments of `rope_attention`, or None."""
    if q_BHD.dim() != 3 or keys_BNSD.dim() != 4 or values_BNSD.dim() != 4:
        return f"q is {list(q_BHD.shape)}, not [B, H, D]; or the caches are no [B, N, S, D]"
    (B, _, D), N, (slots, DV) = q_BHD.shape, keys_BNSD.shape[1], values_BNSD.shape[2:]
    for size in (D, DV):
        if not 16 <= size <= 256 or size != power_of_two(size):
            return f"heads of {size}, no power of two from 16 to 256; use torch's attention"
    if q_BHD.dtype not in DTYPES:
        return f"q is {q_BHD.dtype}, not bfloat16 or float16; use torch's attention"
    if slot.shape != (1,) or slot.dtype != torch.int64:
        return f"the slot is {slot.dtype} {list(slot.shape)}, not an int64 [1]"
    if (q_gain_D is None) != (k_gain_D is None):
        return "one of q and k has a gain, the other has none; give both or neither"
    rows, width = cos_BW.shape if cos_BW.dim() == 2 else (0, 0)
    if rows not in (1, B) or width not in (D, D // 2):
        return f"the angles are {list(cos_BW.shape)}, not [1 or {B}, {D} or {D // 2}]"
    for what, t, shape in (
        ("q", q_BHD, q_BHD.shape),
        ("k", k_BND, (B, N, D)),
        ("v", v_BND, (B, N, DV)),
        ("cos", cos_BW, cos_BW.shape),
        ("sin", sin_BW, cos_BW.shape),
        ("cache of keys", keys_BNSD, (B, N, slots, D)),
        ("cache of values", values_BNSD, (B, N, slots, DV)),
        ("gain of q", q_gain_D, (D,)),
        ("gain of k", k_gain_D, (D,)),
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
    return one_query.refusal(q_BHD, keys_BNSD, values_BNSD, mask_BS, sinks_H)


def _check(*tensors: Tensor | None) -> None:
    reason = refusal(*tensors)  # type: ignore[arg-type]
    if reason is not None:
        raise ValueError(f"rope_attention: {reason}")
