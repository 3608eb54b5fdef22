"""A selective state space (Mamba2) over the tokens of a prompt, of any number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import wide
from moe_ops.decode_ops.delta_rule import chunks, kept_between
from moe_ops.decode_ops.state_space_step import refusal_of, steps_of
from moe_ops.registry.spec import DECODE_OPS, op

CHUNK = 64  # tokens between two states


@dataclass(slots=True)
class StateSpaceScanCall:
    """The arguments of `state_space_scan`."""

    x_BTHV: Tensor
    dt_BTH: Tensor
    a_H: Tensor
    b_BTND: Tensor
    c_BTND: Tensor
    state_BHVD: Tensor | None
    least: float
    most: float
    skip_H: Tensor | None = None
    dt_bias_H: Tensor | None = None
    softplus: bool = False


def refusal(call: StateSpaceScanCall) -> str | None:
    """Why these are no arguments of `state_space_scan`, or None."""
    given = (call.x_BTHV, call.dt_BTH, call.b_BTND, call.c_BTND)
    return refusal_of(given, (call.a_H, call.skip_H, call.dt_bias_H), call.state_BHVD, "BT")


def check(call: StateSpaceScanCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"state_space_scan: {reason}")


@op(check=check, table=DECODE_OPS)
def state_space_scan(call: StateSpaceScanCall) -> tuple[Tensor, Tensor]:
    """(out, state) of `state_space_step` for the tokens t = 0 .. T - 1 one after the other, with dt
    clamped to `least` .. `most`: out [B, T, H, V] and the last state [B, H, V, D], both float32.

    The first state is `state`, or 0 if that is None. x is [B, T, H, V], dt [B, T, H], b and c are
    [B, T, N, D]. One call serves any T: within a chunk a token reads those before it as masked
    attention does, and a loop goes from the state of one chunk to the next. On a GPU it is one
    launch. Raises ValueError for what `refusal` names.
    """
    B, T, H, V = call.x_BTHV.shape
    N, D = call.b_BTND.shape[2:]
    size = min(CHUNK, max(T, 1))
    dt_BTH = steps_of(call.dt_BTH, call.dt_bias_H, call.softplus).clamp(call.least, call.most)
    x, b, c = (chunks(t, size) for t in (call.x_BTHV, call.b_BTND, call.c_BTND))
    dt, log = chunks(dt_BTH, size), chunks(dt_BTH * wide(call.a_H), size)
    given = x * dt
    kept = kept_between(log)
    to_end = kept[..., -1, :, None]
    from_state = log.cumsum(3).exp()

    scores = (c @ b.mT)[:, :, None]  # [B, N, 1, C, size, size], of the heads of a group alike
    grouped = (B, N, H // N)
    in_chunk = (scores * kept.unflatten(1, grouped[1:])).flatten(1, 2) @ given
    added = (given * to_end).mT.unflatten(1, grouped[1:]) @ b[:, :, None]
    added = added.flatten(1, 2)  # [B, H, C, V, D]
    left = from_state[..., -1:, :]

    S = x.new_zeros(B, H, V, D) if call.state_BHVD is None else call.state_BHVD.clone()
    before = torch.empty_like(added)
    for i in range(added.shape[2]):
        before[:, :, i] = S
        S = S * left[:, :, i] + added[:, :, i]
    read = (c[:, :, None] @ before.unflatten(1, grouped[1:]).mT).flatten(1, 2)
    out = (in_chunk + read * from_state).flatten(2, 3)[:, :, :T].transpose(1, 2)
    if call.skip_H is not None:
        out = out + wide(call.skip_H)[:, None] * wide(call.x_BTHV)
    return out.contiguous(), S


state_space_scan.fake(fake_impls.state_space_scan)
