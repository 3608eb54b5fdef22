"""What linear layers of transformers call, computed by our ops: the gated delta rule, Mamba2 and
the convolutions before them. Its own functions loop over chunks in Python, so that each number of
chunks is another graph, and those of packages are no part of a graph.

All have the parameters of transformers' functions, and give None for what is no call of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from moe_ops.decode_ops import (
    convolution_step,
    delta_rule,
    delta_rule_step,
    state_space_scan,
    state_space_step,
)
from moe_ops.generation.one_query import has_kernels

ACTIVATIONS = (None, "silu", "swish")


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """A prompt by the gated delta rule."""
    if initial_state is not None and initial_state.dtype != torch.float32:
        return None
    scale, normalize = query.shape[-1] ** -0.5, use_qk_l2norm_in_kernel
    query, key, value = map(_dense, (query, key, value))
    out, state = delta_rule(query, key, value, g, beta, initial_state, scale, normalize)
    return out, state if output_final_state else None


def stepped_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """One token by the gated delta rule.

    The state is written in place, and is what is given back: a layer hands it to the cache that it
    had it from. It was written before the layer's projections and its convolution.
    """
    state, one = initial_state, query.shape[1] == 1
    if state is None or state.dtype != torch.float32 or not (one and output_final_state):
        return None
    heads = (_dense(x[:, 0]) for x in (query, key, value))
    if g.dim() == beta.dim():  # then both come out of one kernel
        gates = torch.stack([g[:, 0].float(), beta[:, 0].float()]).unbind()
    else:
        gates = g[:, 0], beta[:, 0]
    given = (*heads, *gates)
    scale = query.shape[-1] ** -0.5
    out = delta_rule_step(*given, state, scale, use_qk_l2norm_in_kernel, ahead=True)
    return out[:, None], state


def scanned(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Any:
    """A prompt through Mamba2's state space."""
    if initial_states is not None and initial_states.dtype != torch.float32:
        return None
    if others.get("z") is not None or (D is not None and D.dim() != 1):
        return None
    hidden_states, B, C = map(_dense, (hidden_states, B, C))
    out, state = state_space_scan(
        hidden_states, dt, A, B, C, initial_states, *map(float, dt_limit), D, dt_bias, dt_softplus
    )
    return (out, state) if return_final_states else out


def updated_state(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """One token through Mamba2's state space, with what is one number for a head repeated. The
    state was written before the layer's projections and its convolution."""
    if state.dtype != torch.float32 or z is not None or state.dim() != 4:
        return None
    heads = []
    for t, repeated in ((dt, 1), (A, 2), (D, 1), (dt_bias, 1)):
        if t is not None:
            axes = range(t.dim() - repeated, t.dim())
            if any(t.stride(axis) != 0 and t.shape[axis] != 1 for axis in axes):
                return None
            t = t[..., 0] if repeated == 1 else t[..., 0, 0]
        heads.append(t)
    dt_BH, a_H, skip_H, dt_bias_H = heads
    hidden_states, B, C = map(_dense, (hidden_states, B, C))
    of_heads = (skip_H, dt_bias_H, dt_softplus)
    return state_space_step(hidden_states, dt_BH, a_H, B, C, state, *of_heads, ahead=True)


def convolved(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor | None:
    """A causal convolution [B, C, T] of each channel, as sums that a compiler fuses with what is
    around them."""
    if activation not in ACTIVATIONS:
        return None
    x, taps, T = hidden_states.transpose(1, 2), weight.shape[-1], hidden_states.shape[-1]
    x = pad(x, (0, 0, taps - 1, 0))  # tokens by channels, as what comes behind reads them
    wide = weight.float()
    out = sum(x[:, i : i + T].float() * wide[:, i] for i in range(taps))
    return _activated(out, bias, activation).to(x.dtype).transpose(1, 2)


def convolved_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | None:
    """The next token [B, C, 1] of a causal convolution, whose state of the last inputs moves on in
    place."""
    taps, kept = weight.shape[-1], conv_state.shape[-1]
    if activation not in ACTIVATIONS or hidden_states.shape[-1] != 1 or not 0 < taps <= kept + 1:
        return None
    x = hidden_states[..., 0]
    if has_kernels(x):
        given = x if x.stride(1) == 1 else x.contiguous()
        return convolution_step(given, conv_state, weight, bias, activation is not None)[..., None]
    # A compiler fuses this with what is around it.
    y = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], -1)
    conv_state.copy_(y[..., 1:])
    out = (y[..., kept - taps + 1 :].float() * weight.float()).sum(-1)
    return _activated(out, bias, activation).to(hidden_states.dtype)[..., None]


def _activated(x: Any, bias: Tensor | None, activation: str | None) -> Tensor:
    x = x if bias is None else x + bias.float()
    return x if activation is None else silu(x)


def _dense(x: Tensor) -> Tensor:
    """Heads whose numbers lie side by side, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()
