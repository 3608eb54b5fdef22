"""One token of layers that keep a state: the gated delta rule, state spaces, convolutions.

    delta_rule_step_kernel     a part of the columns of a head's state [D, V]
    state_space_step_kernel    a part of the rows of a head's state [V, D]
    convolution_step_kernel    some channels of a state [D, W]

Every program reads its part of a state at once, and writes it once. Both sums that the delta rule
takes are over what was read: the second, over what is written, follows from them. Each launch waits
for the one before at once, as a state may come from it, unless it is told that it does not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.decode.one_query_plan import power_of_two
from moe_ops.kernels.triton.decode.states_plan import CHANNELS, WARPS, part_of
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn


@on_its_device
def step_delta_rule(
    q_BND: Tensor,
    k_BND: Tensor,
    v_BHV: Tensor,
    g_BHD: Tensor,
    beta_BH: Tensor,
    state_BHDV: Tensor,
    scale: float,
    normalize: bool,
    ahead: bool = False,
    *,
    eps: float,
    part: int | None = None,
    warps: int = WARPS,
) -> Tensor:
    """The op `delta_rule_step` of arguments whose heads and states are contiguous."""
    B, H, D, V = state_BHDV.shape
    part = part_of(D, V) if part is None else part
    blocks = -(-V // part)
    out_BHV = torch.empty(B, H, V, dtype=q_BND.dtype, device=q_BND.device)
    if B == 0:
        return out_BHV
    delta_rule_step_kernel[(B * H * blocks,)](
        q_BND,
        k_BND,
        v_BHV,
        g_BHD,
        beta_BH,
        state_BHDV,
        out_BHV,
        *q_BND.stride()[:2],
        *k_BND.stride()[:2],
        *v_BHV.stride()[:2],
        *g_BHD.stride()[:2],
        *beta_BH.stride(),
        H=H,
        G=H // q_BND.shape[1],
        D=D,
        BD=power_of_two(D),
        V=V,
        BV=part,
        BLOCKS=blocks,
        CHANNELS=g_BHD.dim() == 3,
        NORMALIZE=normalize,
        EPS=eps,
        SCALE=scale,
        AHEAD=ahead,
        num_warps=warps,
        **pdl_options(q_BND),
    )
    return out_BHV


@triton.jit
def delta_rule_step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, NORMALIZE: tl.constexpr,
    EPS: tl.constexpr, SCALE: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a sequence and a head, BV columns of its state."""
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row, head = pair // H, pair % H
    key = head // G
    dims = tl.arange(0, BD)
    columns = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_D, in_V = dims < D, columns < V
    at = pair * D * V + dims[:, None] * V + columns[None, :]
    inside = in_D[:, None] & in_V[None, :]
    if AHEAD:
        state = tl.load(state_ptr + at, mask=inside, other=0.0)
    take_turn(PDL)
    if not AHEAD:
        state = tl.load(state_ptr + at, mask=inside, other=0.0)
    q = tl.load(q_ptr + row * q_row + key * q_head + dims, mask=in_D, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_row + key * k_head + dims, mask=in_D, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * v_row + head * v_head + columns, mask=in_V, other=0.0)
    beta = tl.load(beta_ptr + row * beta_row + head * beta_head).to(tl.float32)
    if NORMALIZE:
        q *= 1.0 / tl.sqrt(tl.sum(q * q, 0) + EPS)
        k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + EPS)
    q *= SCALE
    if CHANNELS:
        g = tl.load(g_ptr + row * g_row + head * g_head + dims, mask=in_D, other=0.0)
        state *= tl.exp(g.to(tl.float32))[:, None]
    else:
        state *= tl.exp(tl.load(g_ptr + row * g_row + head * g_head).to(tl.float32))
    known = tl.sum(state * k[:, None], 0)
    seen = tl.sum(state * q[:, None], 0)
    fresh = (v.to(tl.float32) - known) * beta
    tl.store(state_ptr + at, state + k[:, None] * fresh[None, :], mask=inside)
    out = seen + tl.sum(q * k, 0) * fresh
    tl.store(out_ptr + pair * V + columns, out.to(out_ptr.dtype.element_ty), mask=in_V)


@on_its_device
def step_state_space(
    x_BHV: Tensor,
    dt_BH: Tensor,
    a_H: Tensor,
    b_BND: Tensor,
    c_BND: Tensor,
    state_BHVD: Tensor,
    skip_H: Tensor | None = None,
    dt_bias_H: Tensor | None = None,
    softplus: bool = False,
    ahead: bool = False,
    *,
    part: int | None = None,
    warps: int = WARPS,
) -> Tensor:
    """The op `state_space_step` of arguments whose heads and states are contiguous."""
    B, H, V, D = state_BHVD.shape
    part = part_of(D, V) if part is None else part
    blocks = -(-V // part)
    out_BHV = torch.empty(B, H, V, dtype=x_BHV.dtype, device=x_BHV.device)
    if B == 0:
        return out_BHV
    # An argument that a launch does not read is some tensor; it is not looked at.
    state_space_step_kernel[(B * H * blocks,)](
        x_BHV,
        dt_BH,
        a_H,
        b_BND,
        c_BND,
        state_BHVD,
        a_H if skip_H is None else skip_H,
        a_H if dt_bias_H is None else dt_bias_H,
        out_BHV,
        *x_BHV.stride()[:2],
        *dt_BH.stride(),
        *b_BND.stride()[:2],
        *c_BND.stride()[:2],
        H=H,
        G=H // b_BND.shape[1],
        V=V,
        BV=part,
        BLOCKS=blocks,
        D=D,
        BD=power_of_two(D),
        SKIP=skip_H is not None,
        BIAS=dt_bias_H is not None,
        SOFTPLUS=softplus,
        AHEAD=ahead,
        num_warps=warps,
        **pdl_options(x_BHV),
    )
    return out_BHV


@triton.jit
def state_space_step_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, state_ptr, skip_ptr, dt_bias_ptr, out_ptr,
    x_row, x_head, dt_row, dt_head, b_row, b_head, c_row, c_head,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a sequence and a head, BV rows of its state."""
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row, head = pair // H, pair % H
    group = head // G
    dims = tl.arange(0, BD)
    rows = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_D, in_V = dims < D, rows < V
    at = pair * V * D + rows[:, None] * D + dims[None, :]
    inside = in_V[:, None] & in_D[None, :]
    if AHEAD:
        state = tl.load(state_ptr + at, mask=inside, other=0.0)
    take_turn(PDL)
    if not AHEAD:
        state = tl.load(state_ptr + at, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * x_row + head * x_head + rows, mask=in_V, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + group * b_head + dims, mask=in_D, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + row * c_row + group * c_head + dims, mask=in_D, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * dt_row + head * dt_head).to(tl.float32)
    if BIAS:
        dt += tl.load(dt_bias_ptr + head).to(tl.float32)
    dt = step_length(dt, SOFTPLUS)
    state *= tl.exp(dt * tl.load(a_ptr + head).to(tl.float32))
    state += (dt * x)[:, None] * b[None, :]
    tl.store(state_ptr + at, state, mask=inside)
    out = tl.sum(state * c[None, :], 1)
    if SKIP:
        out += tl.load(skip_ptr + head).to(tl.float32) * x
    tl.store(out_ptr + pair * V + rows, out.to(out_ptr.dtype.element_ty), mask=in_V)


@triton.jit
def step_length(dt, SOFTPLUS: tl.constexpr):
    """dt, or the softplus of it, to which small numbers matter as well: log(1 + x) has, of what
    the sum loses of x, the share that is left over."""
    if not SOFTPLUS:
        return dt
    x = tl.exp(tl.minimum(dt, 20.0))
    sum = 1.0 + x
    small = tl.log(sum) * (x / tl.where(sum == 1.0, 1.0, sum - 1.0))
    return tl.where(dt > 20.0, dt, tl.where(sum == 1.0, x, small))


@on_its_device
def step_convolution(
    x_BD: Tensor,
    state_BDW: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """The op `convolution_step` of arguments whose rows and state are contiguous."""
    B, D, kept = state_BDW.shape
    out_BD = torch.empty(B, D, dtype=x_BD.dtype, device=x_BD.device)
    if out_BD.numel() == 0:
        return out_BD
    blocks = -(-D // CHANNELS)
    convolution_step_kernel[(B * blocks,)](
        x_BD,
        state_BDW,
        weight_DW,
        weight_DW if bias_D is None else bias_D,
        out_BD,
        x_BD.stride(0),
        D=D,
        BD=CHANNELS,
        BLOCKS=blocks,
        KEPT=kept,
        W=weight_DW.shape[1],
        BIAS=bias_D is not None,
        SILU=silu,
        num_warps=WARPS,
        **pdl_options(x_BD),
    )
    return out_BD


@triton.jit
def convolution_step_kernel(
    x_ptr, state_ptr, w_ptr, bias_ptr, out_ptr, x_row,
    D: tl.constexpr, BD: tl.constexpr, BLOCKS: tl.constexpr, KEPT: tl.constexpr, W: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BD channels of a sequence. An input of a channel is read and written by one
    thread, so that none is overwritten before it is read."""
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channels = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    inside = channels < D
    state_ptr += (row * D + channels) * KEPT
    take_turn(PDL)
    x = tl.load(x_ptr + row * x_row + channels, mask=inside, other=0.0)
    last = tl.load(w_ptr + channels * W + W - 1, mask=inside, other=0.0)
    out = x.to(tl.float32) * last.to(tl.float32)
    for i in tl.static_range(KEPT):
        y = tl.load(state_ptr + i, mask=inside, other=0.0)
        if i > 0:
            tl.store(state_ptr + i - 1, y, mask=inside)
        if i >= KEPT - W + 1:
            at = i - (KEPT - W + 1)
            weight = tl.load(w_ptr + channels * W + at, mask=inside, other=0.0)
            out += y.to(tl.float32) * weight.to(tl.float32)
    if KEPT > 0:
        tl.store(state_ptr + KEPT - 1, x.to(state_ptr.dtype.element_ty), mask=inside)
    if BIAS:
        out += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    tl.store(out_ptr + row * D + channels, out.to(out_ptr.dtype.element_ty), mask=inside)
