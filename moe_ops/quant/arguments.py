"""Checks of the quantised arguments that ops share: values, scales, zero points, global scales."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.checks.shapes import (
    DTYPES,
    FLOATS_OR_DOUBLE,
    check_choice,
    check_devices,
    check_tensor,
    wide_dtype,
)
from moe_ops.checks.signature import did_you_mean
from moe_ops.fake_impls.formats import ELEMENTS, PUBLISHED
from moe_ops.quant.formats import TENSOR, Format, keep_by_format
from moe_ops.quant.schemes import SCHEMES


def usual_formats() -> tuple[str, ...]:
    """The formats that have a name or are in a scheme, in this order."""
    schemes = SCHEMES.values()
    found = (f for scheme in schemes for f in (*scheme.weight_formats, *scheme.input_formats) if f)
    return tuple(dict.fromkeys((*PUBLISHED, *found)))


def named_format(name: str, format: str) -> Format:
    """The format of a string. Raises ValueError, which names the argument, if it is not one."""
    try:
        return Format.of(format)
    except ValueError as error:
        said = "" if name == "format" else f"{name}: "  # which the message begins with
        raise ValueError(f"{said}{error}{_hint(format)}") from None


def _hint(format: str) -> str:
    """What may have been meant by a string that is no format."""
    element, colon, _ = format.partition(":")
    if colon:
        return "" if element in ELEMENTS else did_you_mean(element, ELEMENTS)
    if format not in SCHEMES:
        return did_you_mean(format, usual_formats())
    scheme = SCHEMES[format]
    inputs = ", ".join(filter(None, scheme.input_formats))
    several = len(scheme.weight_formats) > 1 or len(scheme.input_formats) > 1
    return (
        f"; it is a scheme, of the weights {', '.join(scheme.weight_formats)}"
        f"{f' and the inputs {inputs}' if inputs else ''}; "
        + (
            f"name one of {'each' if inputs else 'them'}"
            if several
            else f"QuantConfig.of({format!r}) has them"
        )
    )


def check_input_format(name: str, format: str, width: int) -> None:
    """Raise ValueError unless rows of this width can be quantised to the format."""
    if width % packed_inputs(name, format):
        check_packing(name, Format.of(format), width)


@keep_by_format
def packed_inputs(name: str, format: str) -> int:
    """How many values are packed together; raises ValueError if it is no format of inputs."""
    found = named_format(name, format)
    if found.group != TENSOR and found.group[0] != 1:
        raise ValueError(
            f"{name}={format!r} shares scales between rows; inputs want a scale for the tensor, "
            "a row, or columns of one row (such as tensor, row, 1x128)"
        )
    if found.has_zero:
        raise ValueError(f"{name}={format!r} has zero points; inputs are symmetric: take int8")
    if found.scale in ("bfloat16", "float16"):
        raise ValueError(
            f"{name}={format!r} has {found.scale} scales; "
            "inputs want float32, e8m0 or float8_e4m3fn"
        )
    return found.parsed.storage.values


def check_packing(name: str, format: Format, width: int) -> None:
    """Raise ValueError unless rows of this width fill whole bytes."""
    values = format.parsed.storage.values
    if width % values:
        raise ValueError(
            f"{name}={format.name!r} packs {values} values together; pad the width {width} "
            f"to a multiple of {values}"
        )


def check_divides(name: str, format: Format, rows: int, columns: int) -> None:
    """Values fill their bytes and, except for plain float8, their groups."""
    values = format.parsed.storage.values
    if columns % values:
        raise ValueError(
            f"{name} has {columns} columns, but {format.element} is packed in {values}s; "
            f"pad the columns to a multiple of {values}"
        )
    ragged = ragged_axis(format, rows, columns)
    if ragged is not None:
        axis, size, group = ragged
        raise ValueError(
            f"{name} has {size} {axis}, which do not fill {format.name} groups of {group}; "
            f"pad the {axis} to a multiple of {group}"
        )


def ragged_axis(format: Format, rows: int, columns: int) -> tuple[str, int, int] | None:
    """The axis, its size and the group's, of an axis whose last group would not be full where it
    has to be; else None.
    """
    if format.minifloat is not None and format.name not in PUBLISHED:
        return None  # kernels for float8 blocks mask the last one
    sizes = zip(("rows", "columns"), (rows, columns), format.group, strict=True)
    return next((found for found in sizes if found[2] > 0 and found[1] % found[2]), None)


def check_static_scale(
    name: str,
    scale: Tensor | None,
    format: str,
    x: Tensor,
    experts: int = 1,
    rows: int | None = None,
) -> None:
    """Raise unless `scale` may be given for an input of this format: one float32 value or one for
    each of several experts; of a global scale, given `rows`, one for each of these.
    """
    if scale is None:
        return
    found = named_format(f"the format of {name}", format) if format else None
    if found is None or not (found.group == TENSOR or found.has_global_scale):
        raise ValueError(
            f"{name} goes with one scale for the tensor or with nvfp4, got the format {format!r}; "
            "leave it out"
        )
    each, of = experts, "experts here"
    if rows is not None and found.has_global_scale:
        each, of = rows, "rows"
    one = tuple(scale.shape) == (each,) or scale.numel() == 1  # in this order for varying sizes
    if not one or scale.dtype != torch.float32:
        wanted = f" or one for each of the {each} {of}" if each > 1 else ""
        raise ValueError(
            f"{name} must be one float32{wanted}, got {tuple(scale.shape)} of {scale.dtype}"
        )
    check_devices(x, **{name: scale})


def not_codes(x_format: str, x_scale: Tensor | None = None) -> str | None:
    """Why tokens of an input format cannot come as codes of 8 bits with scales of their own, or
    None."""
    if not x_format:
        return "quantises no inputs"
    format = Format.of(x_format)
    if x_scale is not None or format.group == TENSOR:
        return "has a scale that is not a token's own"
    if format.has_global_scale:
        return "has a global scale above those of columns, which does not come with codes"
    if format.bits != 8:
        return f"has codes of {format.bits:g} bits, where those of 8 can come alone"
    return None


def check_tokens(
    x_TD: Tensor, scale_TG: Tensor | None, x_format: str, x_scale: Tensor | None
) -> None:
    """Raise unless tokens are codes of the input format, and the scales theirs."""
    if x_format:
        packed_inputs("x_format", x_format)
    why = not_codes(x_format, x_scale)
    if why is not None:
        raise ValueError(
            f"x_scale_TG and out_dtype go with tokens that are codes, but x_format={x_format!r} "
            f"{why}; give floats, and neither"
        )
    parsed = Format.of(x_format).parsed
    check_tensor("x_TD", x_TD, 2, (parsed.storage.dtype,))
    shape = parsed.scale_shape(*x_TD.shape)
    check_scale("x_scale_TG", scale_TG, shape, parsed.scale_dtype, x_format)
    check_devices(x_TD, x_scale_TG=scale_TG)


def check_scale(
    name: str,
    scale: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    format: str,
    why: str = "",
) -> None:
    """Raise unless these are the scales (or zero points) that a format wants; `why` of that shape,
    for what is said of others."""
    if scale is None:
        raise ValueError(f"{name} is missing: {format!r} wants {_words(shape, dtype)}")
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"{name} must be {_words(shape, dtype)}, got shape {tuple(scale.shape)}{why}"
        )
    if scale.dtype != dtype:
        instead = _of_that_dtype(scale.dtype, dtype, format)
        raise TypeError(f"{name} must be {_words(shape, dtype)}, got {scale.dtype}; {instead}")


def _of_that_dtype(got: torch.dtype, want: torch.dtype, format: str) -> str:
    """What to do with scales or zero points of another dtype."""
    if {got, want} <= {torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn}:
        return f"if it holds the same bytes, give .view({want})"
    named = str(got).removeprefix("torch.")
    if want == torch.float32 and named in DTYPES and ":" in format:
        return f"convert it, or name the format {format}:{named}"
    return "convert it first"


def check_plain(name: str, w: Tensor, dtype: torch.dtype, like: str) -> None:
    """Raise unless a stacked weight without a format has the dtype of the activations, which are
    the argument `like`."""
    codes = w.itemsize == 1 or not w.is_floating_point()
    instead = "of codes name the w_format" if codes else f"convert it first, or {like}"
    check_tensor(name, w, 3, (dtype,), instead)


def check_weight(
    name: str, w: Tensor, scale: Tensor | None, zero: Tensor | None, format: str, transposed: bool
) -> None:
    """Raise unless a stacked weight, its scales and its zero points are those of the format.

    w: [E, F, D packed]; scale and zero: [E, groups of F, groups of D].
    """
    found = named_format("w_format", format)
    parsed = found.parsed
    instead = f"give the codes of w_format={format!r}, or name the format of these"
    check_tensor(name, w, 3, (parsed.storage.dtype,), instead)
    if transposed:
        raise ValueError(f"{name} is transposed; quantised weights want their rows to be outputs")
    if w.shape[2] % parsed.storage.units:
        raise ValueError(
            f"{name} must have a multiple of {parsed.storage.units} bytes a row for "
            f"{format!r}, got shape {tuple(w.shape)}"
        )
    width = parsed.unpacked(w.shape[2])
    shape = (w.shape[0], *parsed.scale_shape(w.shape[1], width))
    why = f"; {name} holds {w.shape[1]} rows of {width} values, in groups of {format!r}"
    check_scale(f"{name}'s scale", scale, shape, parsed.scale_dtype, format, why)
    if found.has_zero:
        check_scale(f"{name}'s zero", zero, shape, torch.uint8, format, why)
    elif zero is not None:
        raise ValueError(
            f"{name}'s zero was given, but {format!r} has no zero points; leave it out"
        )
    check_devices(w, **{f"{name}'s scale": scale, f"{name}'s zero": zero})


def check_global_scale(
    name: str, global_scale_E: Tensor | None, experts: int, w: Tensor, each: int = 1
) -> None:
    """Raise unless `global_scale_E` is one float32 per expert, or as many as `each` says, or None;
    of float64 weights it is float64."""
    if global_scale_E is not None:
        several = each > 1 and global_scale_E.dim() == 2
        shape = (experts, each) if several else (experts,)
        what = f"{each} factors per expert" if several else "a factor per expert"
        check_scale(name, global_scale_E, shape, wide_dtype(w), what)
        check_devices(w, **{name: global_scale_E})


def check_rows_scale(name: str, scale_R: Tensor | None, x_RD: Tensor, x_format: str) -> None:
    """Raise unless `scale_R` is one float32 per row of a format with a global scale, or None."""
    if scale_R is None:
        return
    if not (x_format and Format.of(x_format).has_global_scale):
        raise ValueError(
            f"{name} goes with an x_format that has a global scale (nvfp4), got {x_format!r}; "
            "leave it out"
        )
    check_scale(name, scale_R, (x_RD.shape[0],), torch.float32, "a factor per row")
    check_devices(x_RD, **{name: scale_R})


def check_out_dtype(out_dtype: str, x: Tensor) -> None:
    """Raise unless the result's dtype is known: named, or that of a floating-point input."""
    if out_dtype:
        check_choice("out_dtype", out_dtype, tuple(DTYPES))
    elif x.dtype not in FLOATS_OR_DOUBLE:
        raise ValueError(f"out_dtype must be named ({', '.join(DTYPES)}) for an input of {x.dtype}")


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
