"""What the tensors of a quantised layer must be, operand by operand.

A `QuantConfig` applies every rule when it is made, so that nothing is checked in a forward. Values
of tensors on the meta device cannot be read, and are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.fake_impls.formats import PUBLISHED
from moe_ops.options import check_type
from moe_ops.quant.formats import TENSOR, Format, Layout, Operand
from moe_ops.quant.packing import E8M0_NAN
from moe_ops.quant.schemes import spelled
from moe_ops.shapes import FLOATS, check_devices, check_tensor

TENSOR_FIELDS = ("scale", "global_scale", "zero", "bias")


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
            f"{first} is {spelled(a.format)} and {second} {spelled(b.format)}; "
            "both must have the same format"
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
