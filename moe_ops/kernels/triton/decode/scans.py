"""Prompts through layers that keep a state for each head, in one launch: the gated delta rule and
state spaces.

    delta_rule_kernel     some columns of a state [D, V] through all tokens
    state_space_kernel    some rows of a state [V, D] through all tokens

A program holds its part of one state, and reads the next token while it computes one. It is a
single warp, so that sums need no barrier. Each launch waits for the one before at once: all that it
reads comes from it or from shortly before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.decode.one_query_plan import power_of_two
from moe_ops.kernels.triton.decode.states import step_length
from moe_ops.kernels.triton.decode.states_plan import SCAN_WARPS, part_of_scan
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn


@on_its_device
def scan_delta_rule(
    q_BTND: Tensor,
    k_BTND: Tensor,
    v_BTHV: Tensor,
    g_BTHD: Tensor,
    beta_BTH: Tensor,
    state_BHDV: Tensor | None,
    scale: float,
    normalize: bool,
    *,
    eps: float,
    part: int | None = None,
    warps: int = SCAN_WARPS,
) -> tuple[Tensor, Tensor]:
    """The op `delta_rule` of arguments whose heads and states are contiguous."""
    (B, T, N, D), (H, V) = q_BTND.shape, v_BTHV.shape[2:]
    out_BTHV = torch.empty(B, T, H, V, dtype=q_BTND.dtype, device=q_BTND.device)
    last_BHDV = last_of(state_BHDV, (B, H, D, V), out_BTHV)
    if out_BTHV.numel() == 0:
        return out_BTHV, last_BHDV
    part = part_of_scan(D, V) if part is None else part
    blocks = -(-V // part)
    # An argument that a launch does not read is some tensor; it is not looked at.
    delta_rule_kernel[(B * H * blocks,)](
        q_BTND,
        k_BTND,
        v_BTHV,
        g_BTHD,
        beta_BTH,
        last_BHDV if state_BHDV is None else state_BHDV,
        last_BHDV,
        out_BTHV,
        T,
        *q_BTND.stride()[:3],
        *k_BTND.stride()[:3],
        *v_BTHV.stride()[:3],
        *g_BTHD.stride()[:3],
        *beta_BTH.stride(),
        H=H,
        G=H // N,
        D=D,
        BD=power_of_two(D),
        V=V,
        BV=part,
        BLOCKS=blocks,
        CHANNELS=g_BTHD.dim() == 4,
        NORMALIZE=normalize,
        STATE=state_BHDV is not None,
        EPS=eps,
        SCALE=scale,
        num_warps=warps,
        **pdl_options(q_BTND),
    )
    return out_BTHV, last_BHDV


def last_of(state: Tensor | None, shape: tuple[int, ...], out: Tensor) -> Tensor:
    """Memory for the last state, which is the first where there are no tokens."""
    if out.numel():
        return torch.empty(shape, dtype=torch.float32, device=out.device)
    first = torch.zeros(shape, dtype=torch.float32, device=out.device)
    return first if state is None else state.clone()


@triton.jit(do_not_specialize=["T"])
def delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, last_ptr, out_ptr,
    T, q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    g_row, g_token, g_head, beta_row, beta_token, beta_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, NORMALIZE: tl.constexpr,
    STATE: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a sequence and a head, BV columns of its state."""
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row, head = pair // H, pair % H
    dims = tl.arange(0, BD)
    columns = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_D, in_V = dims < D, columns < V
    of_state = pair * D * V + dims[:, None] * V + columns[None, :]
    inside = in_D[:, None] & in_V[None, :]
    q_ptr += row * q_row + head // G * q_head + dims
    k_ptr += row * k_row + head // G * k_head + dims
    v_ptr += row * v_row + head * v_head + columns
    g_ptr += row * g_row + head * g_head
    beta_ptr += row * beta_row + head * beta_head
    out_ptr += (row * T * H + head) * V + columns
    if CHANNELS:
        g_ptr += dims
        of_gate = in_D
    else:
        of_gate = None
    take_turn(PDL)
    state = tl.zeros((BD, BV), tl.float32)
    if STATE:
        state = tl.load(state_ptr + of_state, mask=inside, other=0.0)
    q = tl.load(q_ptr, mask=in_D, other=0.0)
    k = tl.load(k_ptr, mask=in_D, other=0.0)
    v = tl.load(v_ptr, mask=in_V, other=0.0)
    g = tl.load(g_ptr, mask=of_gate)
    beta = tl.load(beta_ptr)
    for t in range(T):
        on = tl.where(t + 1 < T, 1, 0)  # behind the last token it is read again
        q_ptr += q_token * on
        k_ptr += k_token * on
        v_ptr += v_token * on
        g_ptr += g_token * on
        beta_ptr += beta_token * on
        next_q = tl.load(q_ptr, mask=in_D, other=0.0)
        next_k = tl.load(k_ptr, mask=in_D, other=0.0)
        next_v = tl.load(v_ptr, mask=in_V, other=0.0)
        next_g = tl.load(g_ptr, mask=of_gate)
        next_beta = tl.load(beta_ptr)

        gate = tl.exp(g.to(tl.float32))
        state *= gate[:, None] if CHANNELS else gate
        q32, k32 = q.to(tl.float32), k.to(tl.float32)
        # All sums at once; norms are of what these give.
        known, seen = tl.sum(state * k32[:, None], 0), tl.sum(state * q32[:, None], 0)
        both = tl.sum(q32 * k32, 0) * SCALE
        seen *= SCALE
        if NORMALIZE:
            q_norm = 1.0 / tl.sqrt(tl.sum(q32 * q32, 0) + EPS)
            k_norm = 1.0 / tl.sqrt(tl.sum(k32 * k32, 0) + EPS)
            known, seen, both = known * k_norm, seen * q_norm, both * q_norm * k_norm
            k32 *= k_norm
        fresh = (v.to(tl.float32) - known) * beta.to(tl.float32)
        state += k32[:, None] * fresh[None, :]
        out = seen + both * fresh
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=in_V)
        out_ptr += H * V
        q, k, v, g, beta = next_q, next_k, next_v, next_g, next_beta
    tl.store(last_ptr + of_state, state, mask=inside)


@on_its_device
def scan_state_space(
    x_BTHV: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTND: Tensor,
    c_BTND: Tensor,
    state_BHVD: Tensor | None,
    least: float,
    most: float,
    skip_H: Tensor | None = None,
    dt_bias_H: Tensor | None = None,
    softplus: bool = False,
    *,
    part: int | None = None,
    warps: int = SCAN_WARPS,
) -> tuple[Tensor, Tensor]:
    """The op `state_space_scan` of arguments whose heads and states are contiguous."""
    (B, T, H, V), (N, D) = x_BTHV.shape, b_BTND.shape[2:]
    out_BTHV = torch.empty(B, T, H, V, dtype=torch.float32, device=x_BTHV.device)
    last_BHVD = last_of(state_BHVD, (B, H, V, D), out_BTHV)
    if out_BTHV.numel() == 0:
        return out_BTHV, last_BHVD
    part = part_of_scan(D, V) if part is None else part
    blocks = -(-V // part)
    # An argument that a launch does not read is some tensor; it is not looked at.
    state_space_kernel[(B * H * blocks,)](
        x_BTHV,
        dt_BTH,
        a_H,
        b_BTND,
        c_BTND,
        last_BHVD if state_BHVD is None else state_BHVD,
        a_H if skip_H is None else skip_H,
        a_H if dt_bias_H is None else dt_bias_H,
        last_BHVD,
        out_BTHV,
        T,
        least,
        most,
        *x_BTHV.stride()[:3],
        *dt_BTH.stride(),
        *b_BTND.stride()[:3],
        *c_BTND.stride()[:3],
        H=H,
        G=H // N,
        V=V,
        BV=part,
        BLOCKS=blocks,
        D=D,
        BD=power_of_two(D),
        STATE=state_BHVD is not None,
        SKIP=skip_H is not None,
        BIAS=dt_bias_H is not None,
        SOFTPLUS=softplus,
        num_warps=warps,
        **pdl_options(x_BTHV),
    )
    return out_BTHV, last_BHVD


@triton.jit(do_not_specialize=["T"])
def state_space_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, state_ptr, skip_ptr, dt_bias_ptr, last_ptr, out_ptr,
    T, least, most, x_row, x_token, x_head, dt_row, dt_token, dt_head,
    b_row, b_token, b_head, c_row, c_token, c_head,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, STATE: tl.constexpr, SKIP: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a sequence and a head, BV rows of its state."""
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row, head = pair // H, pair % H
    dims = tl.arange(0, BD)
    rows = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_D, in_V = dims < D, rows < V
    of_state = pair * V * D + rows[:, None] * D + dims[None, :]
    inside = in_V[:, None] & in_D[None, :]
    x_ptr += row * x_row + head * x_head + rows
    dt_ptr += row * dt_row + head * dt_head
    b_ptr += row * b_row + head // G * b_head + dims
    c_ptr += row * c_row + head // G * c_head + dims
    out_ptr += (row * T * H + head) * V + rows
    take_turn(PDL)
    state = tl.zeros((BV, BD), tl.float32)
    if STATE:
        state = tl.load(state_ptr + of_state, mask=inside, other=0.0)
    a = tl.load(a_ptr + head).to(tl.float32)
    bias, skip = 0.0, 0.0
    if BIAS:
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if SKIP:
        skip = tl.load(skip_ptr + head).to(tl.float32)
    x = tl.load(x_ptr, mask=in_V, other=0.0)
    dt = tl.load(dt_ptr)
    b = tl.load(b_ptr, mask=in_D, other=0.0)
    c = tl.load(c_ptr, mask=in_D, other=0.0)
    for t in range(T):
        on = tl.where(t + 1 < T, 1, 0)  # behind the last token it is read again
        x_ptr += x_token * on
        dt_ptr += dt_token * on
        b_ptr += b_token * on
        c_ptr += c_token * on
        next_x = tl.load(x_ptr, mask=in_V, other=0.0)
        next_dt = tl.load(dt_ptr)
        next_b = tl.load(b_ptr, mask=in_D, other=0.0)
        next_c = tl.load(c_ptr, mask=in_D, other=0.0)

        length = step_length(dt.to(tl.float32) + bias, SOFTPLUS)
        length = tl.minimum(tl.maximum(length, least), most)
        x32 = x.to(tl.float32)
        state *= tl.exp(length * a)
        state += (length * x32)[:, None] * b.to(tl.float32)[None, :]
        out = tl.sum(state * c.to(tl.float32)[None, :], 1)
        if SKIP:
            out += skip * x32
        tl.store(out_ptr, out, mask=in_V)
        out_ptr += H * V
        x, dt, b, c = next_x, next_dt, next_b, next_c
    tl.store(last_ptr + of_state, state, mask=inside)
