"""The CPU backend of linear layers in codes: each code is read once for a few rows."""

from __future__ import annotations

from torch import Tensor

from moe_ops.backends.cpu_codes import refusal_of_weights
from moe_ops.backends.cpu_panels import least_panel_rows
from moe_ops.backends.strides import contiguous, with_rows
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall, quantized_linears
from moe_ops.kernels.cpu import quantized as kernels
from moe_ops.quant.formats import Format
from moe_ops.registry.gradients import needs_grad


def supports(call: QuantizedLinearsCall) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if call.x_TK.dtype not in kernels.DTYPES:
        return f"needs float32 or bfloat16, got {call.x_TK.dtype}"
    reason = refusal_of_weights(call.w_format, int(call.x_TK.shape[1]))
    if reason is not None:
        return reason
    if needs_grad(call.x_TK, *call.scales, *call.biases):
        return "is not differentiable, and an argument requires grad"
    held = (*call.weights, *call.scales, *call.zeros)
    if not all(t is None or t.is_contiguous() for t in held):
        return "needs contiguous codes, scales and zero points"
    return kernels.unavailable(Format.of(call.w_format).element)


@quantized_linears.backend(
    "cpu", supports=supports, devices=("cpu",), priority=2, arithmetic=lambda call: "cpu"
)
def multiply(call: QuantizedLinearsCall) -> list[Tensor]:
    """`quantized_linears` by kernels that decode codes as they read them."""
    x_TK, format = with_rows(call.x_TK), Format.of(call.w_format)
    of = kernels.Kind(format.element, format.scale)
    outs = []
    for g, w_NK in enumerate(call.weights):
        zero, bias = call.zeros[g], call.biases[g]
        codes = kernels.Codes(
            w_NK[None], call.scales[g][None], None if zero is None else zero[None], format.group
        )
        bias = None if bias is None else contiguous(bias.to(x_TK.dtype))
        outs.append(kernels.linear(x_TK, codes, bias, of, least_panel_rows(codes=True)))
    return outs
