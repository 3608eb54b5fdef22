"""Why the Triton kernels of experts do not take a call; None where they do."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.backends import triton_formats, triton_inputs
from moe_ops.backends.triton_device import (
    FLOATS,
    HALF,
    LEAST_FLOAT8,
    either,
    refuse_device,
)
from moe_ops.kernels.triton import in_blocks, in_words
from moe_ops.ops.experts import ExpertsCall
from moe_ops.registry.gradients import needs_grad

Formats = tuple[Any, Any, str, torch.dtype]


def supports_experts(call: ExpertsCall) -> str | None:
    x_TD = call.x_TD
    if call.dtype not in FLOATS:
        return f"needs {either(FLOATS)}, got {call.dtype}"
    if needs_grad(x_TD, call.weights_TK, call.w13_EFD, call.w2_EDI, call.b13_EF, call.b2_ED):
        return "is not differentiable, and an argument requires grad"
    return _refuse_scales(call) or refuse_device(x_TD)


def supports_half(call: ExpertsCall) -> str | None:
    """The support of kernels that have no float32."""
    refusal = supports_experts(call)
    if refusal is None and call.dtype not in HALF:
        return f"needs {either(HALF)}, got {call.dtype}"
    return refusal


def supports_codes(call: ExpertsCall) -> str | None:
    """The support of kernels that take quantised weights, too."""
    refusal = supports_half(call)
    if refusal is not None or not call.w_format:
        return refusal
    c = call
    refusal = triton_formats.refusal(c.w_format, c.x_format, c.widths)
    stored = (c.w13_EFD, c.w2_EDI, c.w13_scale_EFG, c.w2_scale_EDG, c.w13_zero_EFG, c.w2_zero_EDG)
    if refusal is None and not all(t is None or t.is_contiguous() for t in stored):
        refusal = "needs contiguous weights, scales and zero points"
    if refusal is None and c.w13_EFD.dtype == torch.float8_e4m3fn:
        refusal = refuse_device(c.w13_EFD, LEAST_FLOAT8)
    if refusal is None:
        weight = weight_of(c)
        size = 4 if in_words(weight) else 2 if in_blocks(weight) else 1
        if any(w.storage_offset() % size for w in (c.w13_EFD, c.w2_EDI)):
            bits = weight.bits
            refusal = f"needs weights of {bits} bits that begin at a multiple of {size} bytes"
    return refusal


def _refuse_scales(call: ExpertsCall) -> str | None:
    """Why kernels do not take the scales of a call beside those of groups, or None."""
    c = call
    found = (c.global_scale13_E, c.global_scale2_E, c.x_scale, c.h_scale)
    common = tuple(t for t in found if t is not None)
    if not c.w_format:
        return "has global scales for quantised weights alone" if common else None
    if needs_grad(c.w13_scale_EFG, c.w2_scale_EDG, *common):
        return "is not differentiable, and an argument requires grad"
    static = tuple(t.numel() for t in (c.x_scale, c.h_scale) if t is not None)
    if not static or formats_of(c.w_format, c.x_format, c.dtype)[2] in ("row", "tensor"):
        return None
    if inputs_of(c) is None:
        return f"quantises inputs to {c.x_format} without static scales"
    return triton_inputs.refusal_of_static(c.x_format, c.dtype == torch.float16, static)


def supports_tiny(call: ExpertsCall) -> str | None:
    """The support of kernels in which all experts read the same tokens."""
    refusal = supports_codes(call)
    if refusal is None and inputs_of(call) is not None:
        return "emulates no inputs, as triton.rows does"
    if refusal is None and call.x_scale is not None and call.x_scale.numel() > 1:
        return "quantises tokens by one static scale, got one for each expert"
    return refusal


def weight_of(call: ExpertsCall) -> Any:
    """The format of a call's weights as the kernels take it; None for floats."""
    return triton_formats.weight_of(call.w_format, call.x_format) if call.w_format else None


def inputs_of(call: ExpertsCall) -> Any:
    """How the inputs of a call are emulated; None if they are not."""
    return triton_inputs.inputs_of(call.w_format, call.x_format) if call.x_format else None


def formats_of(w_format: str, x_format: str, dtype: torch.dtype) -> Formats:
    """Formats as kernels take them: that of weights, how inputs are emulated, what of those of 8
    bits has a scale, and the dtype of results."""
    weight = triton_formats.weight_of(w_format, x_format) if w_format else None
    inputs = triton_inputs.inputs_of(w_format, x_format) if x_format else None
    scaled = triton_formats.scaled_of(x_format) if inputs is None else ""
    return weight, inputs, scaled, dtype
