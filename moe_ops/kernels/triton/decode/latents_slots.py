"""Which slots of a cache of latents are looked at, for the kernels over these."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.decode.one_query import mask_at


@triton.jit
def slots_at(
    index_ptr, mask_ptr, entry, slots: tl.constexpr, counted: tl.constexpr,
    CHOSEN: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """The slots of entries, which are slots or indices of them, and what the mask adds to their
    scores: -inf to what is hidden, or no slot. Such have slot 0."""
    inside = entry < counted
    at = entry
    if CHOSEN:
        at = tl.load(index_ptr + entry, mask=inside, other=-1).to(tl.int32)
        inside = (at >= 0) & (at < slots)
    at = tl.where(inside, at, 0)
    return at, mask_at(mask_ptr, at, inside, LEAST)
