"""The rules of a quantised layer: which formats go together, and what their tensors must be.

`check_config` applies every rule when a QuantConfig is made, so that nothing is checked in a
forward. Values of tensors on the meta device cannot be read, and are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ops.fake_impls.formats import PUBLISHED
from moe_ops.options import MOST_SIZE, check_flag, check_int, check_type
from moe_ops.quant.formats import COLUMN, ROW, TENSOR, Format, Layout, Operand
from moe_ops.quant.packing import E8M0_NAN
from moe_ops.quant.resolve import has_gate_up_scale, merge_gate_up
from moe_ops.shapes import FLOATS, check_devices, check_tensor

if TYPE_CHECKING:
    from moe_ops.quant.config import QuantConfig

TENSOR_FIELDS = ("scale", "global_scale", "zero", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeInfo:
    """A scheme: its name, and the formats of weights and inputs in which it is built.

    "" is a 16-bit operand. Element types decide the scheme; `check_groups` says which groups of
    weights go with which groups of inputs.
    """

    name: str
    weight_formats: tuple[str, ...]
    input_formats: tuple[str, ...] = ("",)


def _formats(elements: str, groups: str) -> tuple[str, ...]:
    return tuple(f"{element}:{group}" for element in elements.split() for group in groups.split())


FP8_WEIGHTS = _formats("float8_e4m3fn", "tensor row 128x128")
FP8_INPUTS = _formats("float8_e4m3fn", "tensor row 1x128")
INT8 = _formats("int8", "tensor row")
INTEGER_GROUPS = "row 1x32 1x64 1x128"
MX_BITS = {"mxfp4": 4, "mxfp6_e3m2": 6, "mxfp6_e2m3": 6}
MX_INPUTS = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8")

# A name is ELEMENT_wBITSaBITS where weights and inputs share their element type or inputs have 16
# bits, the name of the format where that says it all, and else WEIGHTS_w_INPUTS_a.
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        SchemeInfo(name="none", weight_formats=("",)),
        SchemeInfo(name="fp8_w8a8", weight_formats=FP8_WEIGHTS, input_formats=FP8_INPUTS),
        SchemeInfo(name="fp8_w8a16", weight_formats=FP8_WEIGHTS),
        SchemeInfo(name="int8_w8a8", weight_formats=INT8, input_formats=INT8),
        SchemeInfo(name="int8_w8a16", weight_formats=_formats("int8 uint8", INTEGER_GROUPS)),
        SchemeInfo(name="int4_w4a16", weight_formats=_formats("int4 uint4", INTEGER_GROUPS)),
        *(SchemeInfo(name=f"{w}_w{n}a16", weight_formats=(w,)) for w, n in MX_BITS.items()),
        *(
            SchemeInfo(name=f"{w}_w_fp8_a", weight_formats=(w,), input_formats=FP8_INPUTS[:2])
            for w in MX_BITS
        ),
        *(
            SchemeInfo(name=f"{w}_w_{x}_a", weight_formats=(w,), input_formats=(x,))
            for w in MX_BITS
            for x in MX_INPUTS
        ),
        SchemeInfo(name="mxfp8", weight_formats=("mxfp8",), input_formats=("mxfp8",)),
        SchemeInfo(name="mxfp8_w8a16", weight_formats=("mxfp8",)),
        SchemeInfo(name="nvfp4_w4a4", weight_formats=("nvfp4",), input_formats=("nvfp4",)),
        SchemeInfo(name="nvfp4_w4a16", weight_formats=("nvfp4",)),
    )
}


def _kind(format: Format | None) -> str:
    """What of a format decides the scheme: its published name, else its element type."""
    if format is None:
        return ""
    if format.name in PUBLISHED:
        return format.name
    return f"{format.element}:{format.scale}" if format.has_global_scale else format.element


BY_KIND = {
    (_kind(Format.of(w) if w else None), _kind(Format.of(x) if x else None)): scheme.name
    for scheme in SCHEMES.values()
    for w in scheme.weight_formats
    for x in scheme.input_formats
}


def scheme_of(weights: Format | None, inputs: Format | None) -> str:
    """The name of the scheme with these formats. Raises ValueError if there is none."""
    name = BY_KIND.get((_kind(weights), _kind(inputs)))
    if name is None:
        w, x = (_spelled(format) for format in (weights, inputs))
        raise ValueError(
            f"no scheme has {w} weights with {x} inputs; choose one of {', '.join(SCHEMES)}"
        )
    return name


def _spelled(format: Format | None) -> str:
    return "16-bit" if format is None else format.name


def check_config(c: QuantConfig) -> None:
    """Raise ValueError or TypeError, saying what to do, unless the parts of `c` fit together."""
    operands = {"x": c.x, "h": c.h, "w13": c.w13, "w2": c.w2}
    check_sizes(c)
    for name, operand in operands.items():
        check_operand(name, operand)
    check_same("x", c.x, "h", c.h)
    check_same("w13", c.w13, "w2", c.w2)
    scheme_of(c.w13.format, c.x.format)
    check_groups(c.x.format, c.w13.format)
    check_one_device(operands)
    check_input("x", c.x)
    check_input("h", c.h)
    check_gate_up(c)
    for name, operand, rows, columns in (("w13", c.w13, c.F, c.D), ("w2", c.w2, c.D, c.I)):
        check_bias(name, operand, c.E, rows)
        if operand.format is not None:
            check_divides(name, operand.format, rows, columns)
            check_weight_scale(
                name, operand, (c.E, *operand.format.parsed.scale_shape(rows, columns))
            )
            check_zero(name, operand)
            check_global_scale(name, operand, (c.E,))


def check_sizes(c: QuantConfig) -> None:
    """Sizes are positive, and F counts the gate rows and the up rows."""
    for name in ("E", "F", "D", "I"):
        check_int(name, getattr(c, name), least=1, most=MOST_SIZE)
    check_flag("gated", c.gated)
    want = 2 * c.I if c.gated else c.I
    if want != c.F:
        raise ValueError(
            f"F={c.F} does not fit I={c.I}: gated={c.gated} wants F = {'2 * I' if c.gated else 'I'}"
            f" = {want}"
        )


def check_operand(name: str, operand: Operand) -> None:
    """The format is one, the layout is that of the ops, and there is no tensor without a use."""
    check_type(name, operand, Operand, "an Operand")
    check_type(f"{name}.layout", operand.layout, Layout, "a Layout")
    if operand.format is not None and not isinstance(operand.format, Format):
        raise TypeError(
            f"{name}.format must be a Format or None, got {operand.format!r}; Format.of takes names"
        )
    for field in TENSOR_FIELDS:
        t = getattr(operand, field)
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name}.{field} must be a Tensor, got {type(t).__name__}")
    for field in ("order", "transposed", "packing", "scales"):
        got, plain = getattr(operand.layout, field), getattr(Layout(), field)
        if got != plain:
            raise ValueError(
                f"{name} has the layout {field}={got!r}, but the ops read {field}={plain!r}; "
                "quant.checkpoints and quant.resolve convert it"
            )
    if operand.format is None:
        for field in ("scale", "global_scale", "zero"):
            if getattr(operand, field) is not None:
                raise ValueError(
                    f"{name}.{field} is given, but {name} is not quantised; "
                    "leave it out or name the format"
                )


def check_same(first: str, a: Operand, second: str, b: Operand) -> None:
    """One kernel serves both products, so their formats are the same."""
    if a.format != b.format:
        raise ValueError(
            f"{first} is {_spelled(a.format)} and {second} {_spelled(b.format)}; "
            "both must have the same format"
        )


def check_groups(inputs: Format | None, weights: Format | None) -> None:
    """Scales of inputs and weights can be taken out of the sums of the product together."""
    if weights is not None and weights.group == COLUMN:
        raise ValueError(
            f"weights are {weights.name}, but a scale per column cannot leave the sum over columns;"
            " choose tensor, row, or rows x columns"
        )
    if inputs is None or weights is None:
        return
    if inputs.group not in (TENSOR, ROW) and inputs.group[0] != 1:
        raise ValueError(
            f"inputs are {inputs.name}, but a scale of inputs is for all (tensor), for one token "
            "(row), or for some columns of one (such as 1x128)"
        )
    if inputs.group in (TENSOR, ROW):
        if weights.group not in (TENSOR, ROW) and weights.name not in PUBLISHED:
            raise ValueError(
                f"inputs are {inputs.name} and weights {weights.name}: inputs with one scale per "
                "token or tensor go with weights in groups of tensor or row"
            )
    elif weights.name in PUBLISHED and inputs.name not in PUBLISHED:
        raise ValueError(
            f"inputs are {inputs.name} and weights {weights.name}: inputs of {weights.name} weights"
            " have one scale per token or tensor, or are in a published format"
        )
    elif inputs.group[1] != weights.group[1]:
        raise ValueError(
            f"inputs are {inputs.name} and weights {weights.name}: inputs in groups of "
            f"{inputs.group[1]} columns go with weights in blocks of as many columns"
        )


def check_gate_up(c: QuantConfig) -> None:
    """A gated first weight with one scale for all has no scales of its own for gate and up."""
    format, scale = c.w13.format, c.w13.scale
    if c.gated and format is not None and format.group == TENSOR and has_gate_up_scale(scale):
        merge_gate_up(scale)
        raise ValueError(
            f"w13.scale has a gate and an up scale, shape {list(scale.shape)}; "
            f"merge_gate_up makes it {[c.E, 1, 1]}"
        )


def check_one_device(operands: dict[str, Operand]) -> None:
    """All tensors lie on the device of the first."""
    tensors = {
        f"{name}.{field}": t
        for name, operand in operands.items()
        for field in TENSOR_FIELDS
        if (t := getattr(operand, field)) is not None
    }
    if tensors:
        check_devices(next(iter(tensors.values())), **tensors)


def check_input(name: str, operand: Operand) -> None:
    """An input has a static scale where there is one for all, and neither zeros nor bias."""
    for field in ("zero", "bias"):
        if getattr(operand, field) is not None:
            raise ValueError(f"{name}.{field} is given, but inputs have none; leave it out")
    if operand.format is None:
        return
    if operand.scale is not None:
        if operand.format.group != TENSOR:
            raise ValueError(
                f"{name}.scale is given, but {operand.name} inputs get scales at run time; "
                "a static scale goes with the group tensor"
            )
        _check_one_value(f"{name}.scale", operand.scale, operand.format.parsed.scale_dtype)
        check_scale_values(f"{name}.scale", operand.scale)
    check_global_scale(name, operand, None)


def _check_shape(name: str, t: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    check_tensor(name, t, len(shape), dtypes)
    if t.shape != shape:
        raise ValueError(
            f"{name} must have shape {list(shape)} for this layer, got {list(t.shape)}; reshape it"
        )


def _check_one_value(name: str, t: Tensor, dtype: torch.dtype) -> None:
    check_tensor(name, t, t.dim(), (dtype,))
    if t.numel() != 1:
        raise ValueError(f"{name} must be one value, got shape {tuple(t.shape)}; reduce it")


def check_divides(name: str, format: Format, rows: int, columns: int) -> None:
    """Values fill their bytes and, except for plain float8, their groups."""
    values = format.parsed.storage.values
    if columns % values:
        raise ValueError(
            f"{name} has {columns} columns, but {format.element} is packed in {values}s; "
            f"pad the columns to a multiple of {values}"
        )
    if format.minifloat is not None and format.name not in PUBLISHED:
        return  # kernels for float8 blocks mask the last one
    for axis, size, group in zip(("rows", "columns"), (rows, columns), format.group, strict=True):
        if group > 0 and size % group:
            raise ValueError(
                f"{name} has {size} {axis}, which do not fill {format.name} groups of {group}; "
                f"pad the {axis} to a multiple of {group}"
            )


def check_weight_scale(name: str, operand: Operand, shape: tuple[int, ...]) -> None:
    """The scale is there, has this shape [E, rows, columns] and its format's dtype, and is > 0."""
    format, scale = operand.format, operand.scale
    assert format is not None
    if scale is None:
        raise ValueError(f"{name}.scale is missing; {format.name} weights need {list(shape)}")
    _check_shape(f"{name}.scale", scale, shape, format.parsed.scale_dtype)
    check_scale_values(f"{name}.scale", scale)


def check_scale_values(name: str, scale: Tensor) -> None:
    """Every scale is finite and above 0; codes of e8m0 are numbers.

    A float8 scale may be 0: that is what the scale of a block near zero rounds to.
    """
    if scale.is_meta:
        return
    if scale.dtype == torch.uint8:
        bad, want = scale == E8M0_NAN, f"codes below {E8M0_NAN}, which is NaN"
    else:
        value = scale.float()
        zero_fits = scale.dtype == torch.float8_e4m3fn
        positive = value >= 0 if zero_fits else value > 0
        bad = ~(value.isfinite() & positive)
        want = f"finite values {'from' if zero_fits else 'above'} 0"
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name} must hold {want}; {int(bad.sum())} of {bad.numel()} are not, "
            f"the first {scale[tuple(place)].item()} at {place}; quantise that part again"
        )


def check_zero(name: str, operand: Operand) -> None:
    """Unsigned integers alone have zero points: uint8, one per scale, none above the codes."""
    format, zero = operand.format, operand.zero
    assert format is not None and operand.scale is not None
    if not format.has_zero:
        if zero is not None:
            raise ValueError(
                f"{name}.zero is given, but {format.element} has no zero point; leave it out"
            )
        return
    if zero is None:
        raise ValueError(f"{name}.zero is missing; {format.element} needs one zero point per scale")
    _check_shape(f"{name}.zero", zero, operand.scale.shape, torch.uint8)
    assert format.integer is not None
    highest = format.integer.highest
    if not zero.is_meta and int(zero.max()) > highest:
        raise ValueError(
            f"{name}.zero must lie in 0 to {highest}, the codes of {format.element}, "
            f"got {int(zero.max())}; unpack it first"
        )


def check_global_scale(name: str, operand: Operand, shape: tuple[int, ...] | None) -> None:
    """Formats with float8 scales alone have a global scale: of this shape, or one value if None."""
    format, scale = operand.format, operand.global_scale
    assert format is not None
    if not format.has_global_scale:
        if scale is not None:
            raise ValueError(
                f"{name}.global_scale is given, but {format.name} has none; leave it out"
            )
        return
    if scale is None:
        want = "one value" if shape is None else str(list(shape))
        raise ValueError(f"{name}.global_scale is missing; {format.name} needs float32, {want}")
    if shape is None:
        _check_one_value(f"{name}.global_scale", scale, torch.float32)
    else:
        _check_shape(f"{name}.global_scale", scale, shape, torch.float32)
    check_scale_values(f"{name}.global_scale", scale)


def check_bias(name: str, operand: Operand, E: int, rows: int) -> None:
    """A bias is float [E, rows]."""
    if operand.bias is not None:
        _check_shape(f"{name}.bias", operand.bias, (E, rows), *FLOATS)
