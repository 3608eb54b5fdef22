"""Attention of one query token per sequence over a cache with a mask; queries that share a key are
rows of one tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_SLOTS = 1024  # a program reads all slots of a head; with more, few heads keep few processors


def attend(q_BHD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, mask_BS: Tensor, scale: float) -> Tensor:
    """out[b, h] = softmax over slots s with mask[b, s] of (q[b, h] · k[b, n(h), s] scale), times v.

    H / N heads share a key. A sequence has a slot that is not masked. What is in slots behind the
    last of these is not read.
    """
    B, H, D = q_BHD.shape
    N, slots, DV = v_BNSD.shape[1:]
    out = torch.empty(B, H, DV, dtype=v_BNSD.dtype, device=v_BNSD.device)
    group = H // N
    one_query_kernel[(B * N,)](
        q_BHD,
        k_BNSD,
        v_BNSD,
        mask_BS,
        out,
        N,
        mask_BS.stride(0),
        slots=slots,
        G=group,
        BG=max(16, _power_of_two(group)),
        D=D,
        DV=DV,
        BS=64,
        BL=_power_of_two(slots),
        SCALE=scale,  # as an argument, Inductor makes it a float64
        num_warps=4,
    )
    return out


def refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why `attend` is not the way, or None."""
    if not q.is_cuda:
        return "needs CUDA"
    if k.shape[2] > MOST_SLOTS:
        return f"has {k.shape[2]} slots, more than {MOST_SLOTS}"
    for size in (k.shape[3], v.shape[3]):
        if not 16 <= size <= 256 or size != _power_of_two(size):
            return f"heads of {size}, no power of two from 16 to 256"
    if not (k.is_contiguous() and v.is_contiguous()):
        return "the cache is a view"
    return None


def _power_of_two(n: int) -> int:
    """The next one. Dynamo can trace it, other than triton's own."""
    return 1 << (n - 1).bit_length()


@triton.jit
def one_query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    out_ptr,
    N,
    mask_stride,
    slots: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BS: tl.constexpr,
    BL: tl.constexpr,
    SCALE: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)  # a sequence and a head of the cache
    mask_ptr += (pair // N) * mask_stride
    every = tl.arange(0, BL)
    used = tl.load(mask_ptr + every, mask=every < slots, other=0).to(tl.int32)
    end = tl.max(tl.where(used != 0, every + 1, 0))

    rows = tl.arange(0, BG)
    dims, out_dims = tl.arange(0, D), tl.arange(0, DV)
    q = tl.load(
        q_ptr + (pair * G + rows[:, None]) * D + dims[None, :], mask=rows[:, None] < G, other=0.0
    )
    high = tl.full((BG,), float("-inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    acc = tl.zeros((BG, DV), tl.float32)
    # All tiles, as only a known number of them is pipelined; those behind the end read nothing.
    for start in range(0, slots, BS):
        at = start + tl.arange(0, BS)
        inside = at < end
        seen = tl.load(mask_ptr + at, mask=inside, other=0).to(tl.int32) != 0
        where = (pair * slots + at)[:, None]
        k = tl.load(k_ptr + where * D + dims[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new = tl.maximum(high, tl.max(scores, 1))
        # A tile without a seen slot leaves -inf, and -inf minus -inf is no number.
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(scores - safe[:, None])
        shrink = tl.exp(high - safe)
        v = tl.load(v_ptr + where * DV + out_dims[None, :], mask=inside[:, None], other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        high = new
    out = acc / total[:, None]
    tl.store(
        out_ptr + (pair * G + rows[:, None]) * DV + out_dims[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=rows[:, None] < G,
    )
