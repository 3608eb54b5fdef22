"""The Triton backend of `quantize`, for NVIDIA GPUs."""

from __future__ import annotations

from torch import Tensor

from moe_ops.backends.triton_ahead import Before, compiles_ahead
from moe_ops.backends.triton_device import LEAST_CAPABILITY, LEAST_FLOAT8, refuse_device
from moe_ops.ops.quantize import QuantizeCall, quantize
from moe_ops.quant.formats import ALL, TENSOR, Format, keep_by_format
from moe_ops.registry.invariance import Refused

ONCE = ("float8_e4m3fn", "int8")  # elements that may have one scale for the tensor
BLOCKS = ("float8_e4m3fn", "float6_e3m2", "float6_e2m3", "float4_e2m1")
MOST_COLUMNS = 2**16  # of a group, which a program holds
MOST_ELEMENTS = 2**30  # so that groups of any width are counted in 31 bits, with those past the end


def supports(call: QuantizeCall) -> str | None:
    """Why the kernels cannot run a call, or None. What wants a gradient is refused by the op."""
    format = Format.of(call.format)
    known, packed = (*BLOCKS, "int8"), format.parsed.storage.values
    if format.element not in known:
        return f"makes codes of {', '.join(known)}, got {format.element}"
    if format.group == TENSOR and (format.element not in ONCE or format.scale != "float32"):
        return f"takes one float32 scale for {' or '.join(ONCE)} alone, got {format.name}"
    columns = call.x_RD.shape[1] if format.group[1] == ALL else format.group[1]
    if not 0 < columns <= MOST_COLUMNS:
        return f"takes groups of 1 to {MOST_COLUMNS} columns, got {columns}"
    if columns % packed:
        return f"needs groups that {packed} divides, got {columns}"
    if call.x_RD.numel() > MOST_ELEMENTS:
        return f"takes {MOST_ELEMENTS} elements at most, got {call.x_RD.numel()}"
    float8 = "float8_e4m3fn" in (format.element, format.scale)
    return refuse_device(call.x_RD, LEAST_FLOAT8 if float8 else LEAST_CAPABILITY)


def arithmetic_of(call: QuantizeCall) -> str:
    if Format.of(call.format).group == TENSOR and call.scale is None:
        return Refused("one scale is that of all rows; give it")
    return "groups by themselves"


@quantize.backend(
    "triton",
    reads=("format", "scale", "scale_rule"),
    supports=supports,
    devices=("cuda",),
    priority=1,
    arithmetic=arithmetic_of,
)
def launch_quantize(call: QuantizeCall) -> tuple[Tensor, Tensor]:
    """`quantize` in one launch; in two, if one scale for the tensor is to be found."""
    return _quantize(call)


def _quantize(call: QuantizeCall, before: Before = None) -> tuple[Tensor, Tensor]:
    from moe_ops.kernels.triton import quantize as once
    from moe_ops.kernels.triton import quantize_blocks as blocks
    from moe_ops.kernels.triton.replay import replay

    format = Format.of(call.format)
    x_RD = call.x_RD if call.x_RD.stride(1) == 1 else call.x_RD.contiguous()
    if format.element in ONCE and format.scale == "float32":
        rest = (format.group, format.parsed.storage.dtype)
        return replay(once.quantize, (x_RD, call.scale), rest, before)
    kinds = (_element(call.format), format.group[1], format.scale, call.scale_rule)
    return replay(blocks.quantize, (x_RD, call.scale), kinds, before)


compiles_ahead(quantize, "triton", _quantize)


@keep_by_format
def _element(name: str) -> tuple[int | float, ...]:
    """The element of a format as `quantize_blocks` takes it."""
    format = Format.of(name)
    of, storage = format.minifloat, format.parsed.storage
    assert of is not None
    fields = (of.exponent_bits, of.mantissa_bits, of.bias, of.largest, of.top_exponent)
    return (*fields, storage.values, storage.units)
