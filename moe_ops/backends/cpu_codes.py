"""What the backend "cpu" does with quantised weights: its kernels stream codes as they lie, and
quantise inputs to int8 and float8.
"""

from __future__ import annotations

from torch import Tensor

from moe_ops.backends.cpu_panels import least_panel_rows
from moe_ops.kernels.cpu import quantized as kernels
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant.formats import ALL, ROW, TENSOR, Format, keep_by_format
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import Refused

SMALL_GROUPS, GROUP = (32, 64), 128


def refusal(call: ExpertsCall) -> str | None:
    """Why the kernels cannot run a layer with quantised weights, apart from what they have in
    common with those for 16 bits; or None.
    """
    c = call
    scales = (c.w13_scale_EFG, c.w2_scale_EDG, c.w13_zero_EFG, c.w2_zero_EDG)
    known = all(isinstance(width, int) for width in c.widths)  # no compiler leaves them open
    of_formats = _of_formats if known else _of_formats.__wrapped__  # which no cache can look up
    reason = of_formats(c.w_format, c.x_format, *c.widths)
    if reason is not None:
        return reason
    if needs_grad(*scales[:2], c.x_scale, c.h_scale):
        return "is not differentiable, and an argument requires grad"
    if not all(t is None or t.is_contiguous() for t in scales):
        return "needs contiguous scales and zero points"
    return kernels.unavailable(Format.of(c.w_format).element, _element(c.x_format))


def _element(format: str) -> str:
    return Format.of(format).element if format else ""


@keep_by_format
def _of_formats(w_format: str, x_format: str, D: int, I: int) -> str | None:  # noqa: E741
    reason, width = refusal_of_weights(w_format, max(D, I)), max(D, I)
    if reason is not None or not x_format:
        return reason
    return _of_inputs(Format.of(x_format), Format.of(w_format), width)


def refusal_of_weights(w_format: str, width: int) -> str | None:
    """Why the kernels cannot read weights of a format with so many columns at most, or None."""
    format = Format.of(w_format)
    if format.element not in kernels.ELEMENTS:
        return f"needs weights of {', '.join(kernels.ELEMENTS)}, got {format.element}"
    if format.scale not in kernels.SCALES:
        return f"needs scales of {', '.join(kernels.SCALES)}, got {format.scale}"
    across = format.group[1]
    if format.in_blocks and across != ALL:
        return f"needs one scale above a row of {format.element} blocks, got groups of {across}"
    small = across in SMALL_GROUPS or across % GROUP == 0
    if across != ALL and not small and across < width:
        return f"needs groups of 32, 64 or a multiple of 128 columns, or of all, got {across}"
    return None


def _of_inputs(inputs: Format, weights: Format, width: int) -> str | None:
    """Why inputs of a format are not quantised for such weights, or None."""
    if inputs.element not in kernels.INPUTS or inputs.scale != "float32":
        return f"quantises inputs to int8 and float8_e4m3fn with float32 scales, got {inputs.name}"
    whole = inputs.group in (TENSOR, ROW)
    if inputs.element == "int8":
        if weights.element != "int8" or weights.group not in (TENSOR, ROW) or not whole:
            return (
                "multiplies int8 inputs and weights of one scale a row or tensor each, got "
                f"{inputs.name} and {weights.name}"
            )
        if width > kernels.MOST_INTEGERS:
            return f"sums up to {kernels.MOST_INTEGERS} products in int32, got {width}"
    elif not whole and (inputs.group[1] % GROUP or inputs.group[1] != weights.group[1]):
        return (
            "wants groups of inputs that are those of the weights and a multiple of 128 columns, "
            f"got {inputs.name} and {weights.name}"
        )
    return None


def arithmetic(call: ExpertsCall) -> str:
    """How the kernels compute a token's row, of a layer with quantised weights."""
    return Refused(why) if (why := refusal_of_one_scale(call)) else "cpu"


def refusal_of_one_scale(call: ExpertsCall) -> str | None:
    """Why all rows of an input decide the scale of each, or None."""
    if not call.x_format or Format.of(call.x_format).group != TENSOR:
        return None
    return None if call.has_input_scales else ONE_SCALE


ONE_SCALE = (
    "one scale for all tokens is made of the largest of them; give x_scale and h_scale, or take "
    "inputs with a scale for each row"
)


def run(call: ExpertsCall, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
    """`experts` that reads each code once for a few tokens, given tokens with contiguous rows and
    contiguous ids of the experts here.
    """
    c, format = call, Format.of(call.w_format)
    of_x = _input_scales(c.x_format, c.x_scale, c.x_scale_TG)
    of_h = _input_scales(c.x_format, c.h_scale)
    if c.x_scale_TG is not None:
        x_TD = x_TD.to(c.dtype)  # which every code of 8 bits is exact in
    assert c.w13_scale_EFG is not None and c.w2_scale_EDG is not None
    return kernels.experts(
        x_TD, c.weights_TK.contiguous(), ids_TK,
        kernels.Codes(c.w13_EFD, c.w13_scale_EFG, c.w13_zero_EFG, format.group, of_x),
        kernels.Codes(c.w2_EDI, c.w2_scale_EDG, c.w2_zero_EDG, format.group, of_h),
        (c.b13_EF, c.b2_ED),
        (c.kind, c.gated, c.interleaved, c.alpha, c.limit, c.up_shift),
        kernels.Kind(format.element, format.scale, _element(c.x_format)),
        least_panel_rows(codes=True),
    )  # fmt: skip


def _input_scales(
    x_format: str, static: Tensor | None, of_rows: Tensor | None = None
) -> kernels.InputScales:
    if not x_format:
        return kernels.InputScales()
    given = (None if scale is None else scale.contiguous() for scale in (static, of_rows))
    return kernels.InputScales(Format.of(x_format).group, *given)
