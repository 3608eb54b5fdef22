"""What lies between projections and attention of one query token per sequence, in one launch.

    rope_kernel    a head of q, of k or of v: normed, turned by its position, put where it belongs

As separate launches each of these is a microsecond of waiting for the one before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch


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
    """The heads of q turned; those of k, turned too, and of v in their slot of the cache. What the
    arguments are says `moe_ops.decode_ops.rope_attention.rope_attention`, whose `refusal` lets them
    pass."""
    (B, H, D), (N, slots, DV) = q_BHD.shape, values_BNSD.shape[1:]
    out_BHD = torch.empty_like(q_BHD)
    launch(
        rope_kernel, (H + 2 * N, B),
        q_BHD, k_BND, v_BND, cos_BW, sin_BW, slot, q_gain_D, k_gain_D,
        out_BHD, keys_BNSD, values_BNSD,
        H=H, N=N, S=slots, D=D, DV=DV, W=cos_BW.shape[1], ROWS=cos_BW.shape[0], EPS=eps,
        num_warps=1, **pdl_options(q_BHD),
    )  # fmt: skip
    return out_BHD


@triton.jit
def normed(x_GD, inverse_G, gain_D):
    """x times the inverse, rounded, times the gain, rounded, in float32."""
    dtype: tl.constexpr = gain_D.dtype
    rounded_GD = (x_GD * inverse_G[:, None]).to(dtype).to(tl.float32)
    return (rounded_GD * gain_D.to(tl.float32)[None, :]).to(dtype).to(tl.float32)


@triton.jit
def turned(
    x_G1, gain_ptr, gain_D, gain_other_D, cos_ptr, sin_ptr,
    D: tl.constexpr, W: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The heads at some addresses, normed if there is a gain, and turned; in their dtype."""
    d_D = tl.arange(0, D)
    other_D = (d_D + D // 2) % D
    x_GD = tl.load(x_G1 + d_D[None, :])
    dtype: tl.constexpr = x_GD.dtype
    x_GD = x_GD.to(tl.float32)
    x_other_GD = tl.load(x_G1 + other_D[None, :]).to(tl.float32)
    if gain_ptr is not None:
        inverse_G = tl.rsqrt(tl.sum(x_GD * x_GD, 1) / D + EPS)
        x_GD = normed(x_GD, inverse_G, gain_D)
        x_other_GD = normed(x_other_GD, inverse_G, gain_other_D)
    x_other_GD = tl.where((d_D < D // 2)[None, :], -x_other_GD, x_other_GD)
    cos_D = tl.load(cos_ptr + d_D % W).to(tl.float32)
    sin_D = tl.load(sin_ptr + d_D % W).to(tl.float32)
    return (x_GD * cos_D[None, :] + x_other_GD * sin_D[None, :]).to(dtype)


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
    take_turn(PDL)
    if ROWS > 1:
        cos_ptr += b * W
        sin_ptr += b * W
    slot = tl.load(slot_ptr)
    d_1D = tl.arange(0, D)[None, :]
    one_1 = tl.arange(0, 1)[:, None]  # of one head
    if head < H:
        at = (b * H + head) * D
        turned_1D = turned(
            q_ptr + at + one_1, q_gain_ptr, gain_D, gain_other_D, cos_ptr, sin_ptr, D, W, EPS
        )
        tl.store(out_ptr + at + d_1D, turned_1D)
    elif head < H + N:
        n = b * N + head - H
        turned_1D = turned(
            k_ptr + n * D + one_1, q_gain_ptr, gain_D, gain_other_D, cos_ptr, sin_ptr, D, W, EPS
        )
        tl.store(keys_ptr + (n * S + slot) * D + d_1D, turned_1D)
    else:
        n = b * N + head - H - N
        d_V = tl.arange(0, DV)
        tl.store(values_ptr + (n * S + slot) * DV + d_V, tl.load(v_ptr + n * DV + d_V))
