"""Device functions of the expert activation, in float32; `moe_ops/ops/activate.py` has the math.

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
def activate_gated(gate, up, ACT: tl.constexpr):
    """f(min(gate, limit)) * (clamp(up, ±limit) + up shift); ACT is an `Act`."""
    LIMIT: tl.constexpr = ACT.limit
    UP_SHIFT: tl.constexpr = ACT.up_shift
    if LIMIT is not None:
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if UP_SHIFT != 0.0:
        up = up + UP_SHIFT
    return activate(gate, ACT) * up
