"""What lies between projections and attention of one query token per sequence, in one launch.

    rope_kernel    a head of q, of k or of v: normed, turned by its position, put where it belongs

As separate launches each of these is a microsecond of waiting for the one before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import pdl_options


def run(
    q_BHD: Tensor,
    k_BND: Tensor,
    v_BND: Tensor,
    cos_BW: Tensor,
    sin_BW: Tensor,
    slot: Tensor,
    keys_BNSD: Tensor,
    values_BNSD: Tensor,
    q_gain_D: Tensor | None,
    k_gain_D: Tensor | None,
    eps: float,
) -> Tensor:
    """`moe_ops.kernels.rope.rope_into_cache` of arguments that its `refusal` lets pass."""
    (B, H, D), (N, slots, DV) = q_BHD.shape, values_BNSD.shape[1:]
    pdl, options = pdl_options(q_BHD)
    out_BHD = torch.empty_like(q_BHD)
    rope_kernel[(H + 2 * N, B)](
        q_BHD, k_BND, v_BND, cos_BW, sin_BW, slot, q_gain_D, k_gain_D,
        out_BHD, keys_BNSD, values_BNSD,
        H=H, N=N, S=slots, D=D, DV=DV, W=cos_BW.shape[1], ROWS=cos_BW.shape[0], EPS=eps, PDL=pdl,
        num_warps=1, **options,
    )  # fmt: skip
    return out_BHD


@triton.jit
def normed(x_D, inverse, gain_D):
    """x times the inverse, rounded, times the gain, rounded, in float32."""
    return ((x_D * inverse).to(gain_D.dtype).to(tl.float32) * gain_D.to(tl.float32)).to(
        gain_D.dtype
    ).to(tl.float32)  # fmt: skip


@triton.jit
def turn(
    x_ptr, gain_ptr, gain_D, gain_other_D, cos_ptr, sin_ptr, out_ptr,
    D: tl.constexpr, W: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Norm, turn and store one head."""
    d_D = tl.arange(0, D)
    other_D = (d_D + D // 2) % D
    x_D = tl.load(x_ptr + d_D).to(tl.float32)
    x_other_D = tl.load(x_ptr + other_D).to(tl.float32)
    if gain_ptr is not None:
        inverse = tl.rsqrt(tl.sum(x_D * x_D, 0) / D + EPS)
        x_D = normed(x_D, inverse, gain_D)
        x_other_D = normed(x_other_D, inverse, gain_other_D)
    x_other_D = tl.where(d_D < D // 2, -x_other_D, x_other_D)
    cos_D = tl.load(cos_ptr + d_D % W).to(tl.float32)
    sin_D = tl.load(sin_ptr + d_D % W).to(tl.float32)
    out_D = x_D * cos_D + x_other_D * sin_D
    tl.store(out_ptr + d_D, out_D.to(out_ptr.dtype.element_ty))


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slot_ptr, q_gain_ptr, k_gain_ptr,
    out_ptr, keys_ptr, values_ptr,
    H: tl.constexpr, N: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one head of one sequence; those of q come first, then those of k and of v."""
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    gain_D, gain_other_D = 0.0, 0.0
    if q_gain_ptr is not None:  # parameters: there before the launch before
        d_D = tl.arange(0, D)
        gain_ptr = q_gain_ptr
        if head >= H:
            gain_ptr = k_gain_ptr
        gain_D = tl.load(gain_ptr + d_D)
        gain_other_D = tl.load(gain_ptr + (d_D + D // 2) % D)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ROWS > 1:
        cos_ptr += b * W
        sin_ptr += b * W
    slot = tl.load(slot_ptr)
    if head < H:
        at = (b * H + head) * D
        turn(
            q_ptr + at, q_gain_ptr, gain_D, gain_other_D, cos_ptr, sin_ptr, out_ptr + at, D, W, EPS
        )
    elif head < H + N:
        n = b * N + head - H
        turn(
            k_ptr + n * D, q_gain_ptr, gain_D, gain_other_D, cos_ptr, sin_ptr,
            keys_ptr + (n * S + slot) * D, D, W, EPS,
        )  # fmt: skip
    else:
        n = b * N + head - H - N
        d_V = tl.arange(0, DV)
        tl.store(values_ptr + (n * S + slot) * DV + d_V, tl.load(v_ptr + n * DV + d_V))
