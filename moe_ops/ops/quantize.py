"""Quantisation of inputs: from floats to codes and the scales that undo it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import FLOATS, check_tensor
from moe_ops.quant import packing
from moe_ops.quant.arguments import check_input_format, check_static_scale
from moe_ops.quant.formats import ROW, TENSOR, Format
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import Refused
from moe_ops.registry.spec import op


@dataclass(slots=True)
class QuantizeCall:
    """The arguments of `quantize`."""

    x_RD: Tensor
    format: str = "float8_e4m3fn:row"
    scale: Tensor | None = None
    scale_rule: str = "floor"


def check(call: QuantizeCall) -> None:
    """Raise ValueError or TypeError unless `quantize` takes these arguments."""
    check_tensor("x_RD", call.x_RD, 2, FLOATS)
    check_input_format("format", call.format, call.x_RD.shape[1])
    check_static_scale("scale", call.scale, call.format, call.x_RD, rows=call.x_RD.shape[0])
    packing.check_scale_rule(call.scale_rule, Format.of(call.format))
    _refuse_gradient(call.x_RD, call.scale)


def _refuse_gradient(x_RD: Tensor, scale: Tensor | None) -> None:
    if needs_grad(x_RD, scale):
        raise ValueError(
            "quantize has no gradient, as rounding is flat, and got a tensor that requires one; "
            "detach it, call it under torch.no_grad(), or round by moe_ops.fake_quantize, through "
            "which gradients pass"
        )


def arithmetic(call: QuantizeCall) -> str:
    """That of the definition: of each row by itself one division and one rounding of a value, both
    exact, unless all rows have one scale, which is made of them."""
    if call.scale is None and Format.of(call.format).group == TENSOR:
        return Refused(f"{call.format} takes one scale from all rows; give a static scale")
    return "each value divided by its scale and rounded"


@op(check=check, arithmetic=arithmetic)
def quantize(call: QuantizeCall) -> tuple[Tensor, Tensor]:
    """Round x to a format. Returns (q, scale_RG) with x close to decode(q) * scale.

    `format` is element:group[:scale], or a published name such as mxfp8 (the grammar is in
    `fake_impls/formats.py`, the numbers in `quant/formats.py` and `quant/packing.py`). Its group is
    the whole tensor, a row, or some columns of a row. Float32 scales are the largest magnitude of
    the group over the element's largest finite value; e8m0 scales are powers of two: by the
    `scale_rule` "floor" those of OCP Microscaling, which lets the largest values of a group
    saturate, by "ceil" twice as large where they would. Values are divided by their scale, rounded
    half to even and saturated.

    `scale` makes the scale static: the one of the whole tensor, or for nvfp4 the global scale that
    multiplies all block scales (1 if left out; it is not part of the returned scales). That may be
    float32 [R], one for each row.

    A row's codes and scales depend on that row alone, with one exception: a format with one scale
    for the tensor, such as int8:tensor, takes it from all rows if `scale` is left out. One large or
    NaN row then spoils the others. Name such a format only where rows belong together.

    x_RD: float [R, D]; q: [R, D packed] in the format's dtype; scale_RG in its scale dtype, a
    decoding multiplier. R = 0 gives empty results. Raises ValueError or TypeError for wrong shapes,
    dtypes, devices or formats.
    """
    found, scale = Format.of(call.format), call.scale
    x = call.x_RD.float()
    if found.group == TENSOR:
        if scale is None and x.shape[0] == 0:
            x = x.new_zeros(1, x.shape[1])  # no rows: the scale is that of zeros
        given = None if scale is None else scale.reshape(1, 1).clone()
        done = packing.quantize(x, found, scale=given)
    elif scale is not None and scale.dim() == 1 and scale.shape[0] == x.shape[0]:
        done = packing.quantize(x[:, None], found, global_scale=scale)
        return done.values[:, 0], done.scale[:, 0]
    else:
        done = packing.quantize(x, found, global_scale=scale, scale_rule=call.scale_rule)
    return done.values[: call.x_RD.shape[0]], done.scale


def quantize_rows(x_RD: Tensor, format: str, scale_R: Tensor) -> tuple[Tensor, Tensor, str]:
    """Round each row to a format of one scale for the tensor, or of a global scale, with a static
    scale of its own.

    Returns what `quantize` does, and the format that the rows then have: a scale for each, or below
    global scales the same. No op, so that no pass takes it for one whose scale is that of all rows.
    """
    _refuse_gradient(x_RD, scale_R)
    if Format.of(format).has_global_scale:
        done = packing.quantize(x_RD[:, None], Format.of(format), global_scale=scale_R)
        return done.values[:, 0], done.scale[:, 0], format
    found = replace(Format.of(format), group=ROW)
    done = packing.quantize(x_RD, found, scale=scale_R[:, None])
    return done.values, done.scale, found.name


quantize.fake(fake_impls.quantize)
