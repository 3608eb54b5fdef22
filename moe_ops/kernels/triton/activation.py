"""Device functions of the expert activation, in float32; `moe_ops/ops/activate.py` has the math,
and `activate_backward.py` there that of its derivative.

NaN stays NaN, where the GPU's minimum and maximum would take the other number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(gate, ACT: tl.constexpr):
    """f(min(gate, limit)); ACT is an `Act`."""
    KIND: tl.constexpr = ACT.kind
    ALPHA: tl.constexpr = ACT.alpha
    LIMIT: tl.constexpr = ACT.limit
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "silu":
        return gate * sigmoid(ALPHA * gate)
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # tanh(z) = 2 sigmoid(2z) - 1, so that (1 + tanh(z)) / 2 is one sigmoid.
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * sigmoid(2.0 * z)
    else:
        tl.static_assert(KIND == "relu2")
        relu = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return relu * relu


@triton.jit
def shifted(up, ACT: tl.constexpr):
    """clamp(up, ±limit) + up shift; ACT is an `Act`."""
    LIMIT: tl.constexpr = ACT.limit
    UP_SHIFT: tl.constexpr = ACT.up_shift
    if LIMIT is not None:
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if UP_SHIFT != 0.0:
        up = up + UP_SHIFT
    return up


@triton.jit
def activate_gated(gate, up, ACT: tl.constexpr):
    """f(min(gate, limit)) * (clamp(up, ±limit) + up shift); ACT is an `Act`."""
    up = shifted(up, ACT)
    return activate(gate, ACT) * up


@triton.jit
def derivative(gate, ACT: tl.constexpr):
    """The derivative of `activate` by gate: 0 past the limit, and that of f at it."""
    KIND: tl.constexpr = ACT.kind
    ALPHA: tl.constexpr = ACT.alpha
    LIMIT: tl.constexpr = ACT.limit
    g = gate
    if LIMIT is not None:
        g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "silu":
        s = sigmoid(ALPHA * g)
        slope = s * (1.0 + ALPHA * g * (1.0 - s))
    elif KIND == "gelu":
        density = tl.exp(-0.5 * g * g) * 0.3989422804014327
        slope = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476)) + g * density
    elif KIND == "gelu_tanh":
        # With tanh(z) = 2 s - 1, its derivative is 4 s (1 - s).
        s = sigmoid(2.0 * 0.7978845608028654 * (g + 0.044715 * g * g * g))
        inner = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g)
        slope = s + 2.0 * g * s * (1.0 - s) * inner
    else:
        tl.static_assert(KIND == "relu2")
        slope = 2.0 * tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if LIMIT is not None:
        slope *= (gate <= LIMIT).to(tl.float32)
    return slope
