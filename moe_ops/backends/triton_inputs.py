"""The formats of inputs that the Triton kernels emulate: inputs are rounded to what codes stand
for, and multiplied in 16 bits, as GPUs before Blackwell have no instruction for such codes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_ops.kernels.triton import Inputs
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant.formats import ROW, TENSOR, Format, keep_by_format
from moe_ops.quant.scales import one_input_scale

WHOLE = {ROW: "row", TENSOR: "tensor"}
GROUPS = (16, 32, 64, 128, 256)  # columns that share a scale of eight bits
PART = 128  # columns that are rounded together where more than these share a scale


@keep_by_format
def inputs_of(w_format: str, x_format: str) -> Inputs | None:
    """How inputs of a format are emulated for weights of another one; None if they are not."""
    if not x_format or not _emulates(Format.of(w_format), Format.of(x_format)):
        return None
    format = Format.of(x_format)
    scale = WHOLE.get(format.group, format.scale)
    group = PART if format.group in WHOLE else format.group[1]
    of = format.minifloat
    if of is None:  # an integer, whose steps are all 1
        bits = format.bits - 1
        return Inputs(bits, bits, format.largest, bits - 1, False, scale, group)
    numbers = (1 - of.bias, of.mantissa_bits, of.largest, of.top_exponent)
    return Inputs(*numbers, of.native, scale, group)


def _emulates(weights: Format, inputs: Format) -> bool:
    """Scales of eight bits stay exact. Products with a float32 scale of all columns are rounded
    once, where weights have fewer bits or scales of powers of two, so that codes are not multiplied
    as such. So are those with one of some columns, where weights are integers of fewer bits; else
    such a scale has kernels of its own or none."""
    if inputs.scale != "float32":
        return inputs.group[1] in GROUPS
    if inputs.group in WHOLE:
        return weights.bits < 8 or weights.scale == "e8m0"
    few = weights.integer is not None and weights.bits < 8
    return few and inputs.group[0] == 1 and inputs.group[1] in GROUPS


def with_one_scale(call: ExpertsCall) -> ExpertsCall:
    """A call with one static global scale for the inputs of all experts, if it has one for each."""
    c = call
    if not (c.x_format and Format.of(c.x_format).has_global_scale):
        return c
    made: dict[str, Any] = {}
    for scale, factors in (("x_scale", "global_scale13_E"), ("h_scale", "global_scale2_E")):
        static, global_scale_E = getattr(c, scale), getattr(c, factors)
        if static is not None and static.numel() > 1:
            assert global_scale_E is not None
            made[scale], made[factors] = one_input_scale(static, global_scale_E)
    return replace(c, **made) if made else c


def refusal_of_static(x_format: str, half: bool, scales: tuple[int, ...]) -> str | None:
    """Why inputs of a format that is emulated are not rounded by static scales of so many values
    each, or None; half: whether they are float16. Global scales of experts become one."""
    if any(n > 1 for n in scales) and not Format.of(x_format).has_global_scale:
        return "quantises inputs by one static scale for all experts, got one for each"
    if half and scales and Format.of(x_format).group == TENSOR:
        return "has no room in float16 for codes times a static scale; use bfloat16"
    return None
