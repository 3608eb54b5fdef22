"""Values to codes and back: packing, scales, and the quantisation of whole matrices.

Everything is plain torch, computed in float32 and free of decisions that depend on data, so it runs
on every device, in `torch.compile` and in a CUDA graph. What codes of an element stand for is in
`moe_ops/quant/elements/`. Sources of the scales:

    e8m0                OCP Microscaling Formats (MX) Specification, version 1.0
    float8_e4m3fn       NVFP4: blocks of 16 with float8_e4m3fn scales under one float32 scale, as in
                        NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ops.checks.shapes import FLOATS, check_choice
from moe_ops.fake_impls.formats import ALL, SCALES
from moe_ops.quant.elements.bits import joined, split
from moe_ops.quant.elements.kinds import FLOAT32_MANTISSA
from moe_ops.quant.elements.table import element_of
from moe_ops.quant.formats import Format

# A group of zeros still needs a scale that can be divided by.
SMALLEST_SCALE = 1e-12
E8M0_BIAS, E8M0_NAN = 127, 255


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """A quantised matrix [..., rows, columns], or one for each leading index."""

    values: Tensor  # packed along the columns
    scale: Tensor  # [..., row groups, column groups]
    zero: Tensor | None  # uint8, the shape of scale; only where the element has a zero point


def encode(x: Tensor, element: str) -> Tensor:
    """Round floats of any shape to codes of an element, one code for each value.

    Halves go to the even code, values beyond the range (infinities too) to the largest finite one.
    The sign of zero and subnormals are kept. NaN stays NaN in float8; elsewhere it is coded as +0.

    Codes are torch.float8_* or torch.int8 for the elements of these names, else torch.uint8: sign,
    exponent and mantissa bits of float4 and float6 (MX 1.0, section 5.3), the value + 8 of int4,
    the value of uint4 and uint8. Of blocks, bytes [..., n * units] of values [..., n * values].
    Raises ValueError for an unknown element, and for values that do not fill its blocks.
    """
    found = element_of(element)
    if found.storage.block:
        _check_multiple(x, element, found.storage.values, "values", "pad the columns")
    return found.encode(x.float())


def decode(codes: Tensor, element: str) -> Tensor:
    """The exact float32 value of every code that `encode` gives (int4: code - 8); of blocks, all
    values of each."""
    return element_of(element).decode(codes)


def pack(codes: Tensor, element: str) -> Tensor:
    """Pack codes along the last axis, the first value in the lowest bits.

    Two bits: four values a byte. Four bits: two. Six bits: four values in three bytes, value i in
    bits 6i to 6i+5 of the 24, little-endian. Eight bits: unchanged. [..., n] becomes [..., n /
    values * units] as the element's storage says. Raises ValueError if n is no multiple of the
    values that are packed together.
    """
    storage = element_of(element).storage
    if storage.values == 1 or storage.block:
        return codes
    _check_multiple(codes, element, storage.values, "codes", "pad the columns")
    return joined(codes, storage)


def unpack(stored: Tensor, element: str) -> Tensor:
    """The codes that `pack` packed. Raises ValueError if the last axis cannot come from it."""
    storage = element_of(element).storage
    if storage.values == 1:
        return stored
    _check_multiple(stored, element, storage.units, "packed bytes", "pass whole rows")
    return stored if storage.block else split(stored, storage)


def _check_multiple(t: Tensor, element: str, of: int, what: str, remedy: str) -> None:
    if t.dim() == 0 or t.shape[-1] % of:
        raise ValueError(
            f"{element} wants {what} in multiples of {of} on the last axis, "
            f"got shape {tuple(t.shape)}; {remedy}"
        )


def decode_scale(scale: Tensor, kind: str) -> Tensor:
    """Stored scales as float32, exactly.

    e8m0 (MX 1.0, section 5.4.1): u is 2**(u - 127), where 255 is NaN and 0 the float32 subnormal
    2**-127. Other kinds are floats. Raises ValueError for an unknown kind.
    """
    check_choice("kind", kind, tuple(SCALES))
    if kind != "e8m0":
        return scale.float()
    code = scale.int()
    half = 1 << (FLOAT32_MANTISSA - 1)  # as bits: of 2**-127, and what makes an infinity a NaN
    is_special = (code == 0) | (code == E8M0_NAN)
    return ((code << FLOAT32_MANTISSA) + is_special.int() * half).view(torch.float32)


def encode_scale(scale: Tensor, kind: str) -> Tensor:
    """Float scales in the dtype in which this kind of scale is stored.

    e8m0: the largest power of two not above the scale, between 2**-127 and 2**127; NaN, infinities
    and negative numbers become 255, which is NaN. float8_e4m3fn: rounded half to even, saturated at
    448, NaN kept. Others: rounded. Raises ValueError for an unknown kind.
    """
    check_choice("kind", kind, tuple(SCALES))
    if kind == "float8_e4m3fn":
        return encode(scale, kind)
    if kind != "e8m0":
        return scale.to(SCALES[kind])
    bits = scale.float().view(torch.int32)
    exponent = (bits >> FLOAT32_MANTISSA) & 0xFF  # 2**-127 and all below it have exponent field 0
    return torch.where(scale < 0, E8M0_NAN, exponent).to(torch.uint8)


def expand(scale: Tensor, group: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Repeat [..., row groups, column groups] until it broadcasts against [..., rows, columns].

    An axis whose group is all of it (-1) keeps size 1; the last group of an axis may be cut short.
    Raises ValueError if the number of groups does not fit.
    """
    for axis, (n, size) in zip((-2, -1), zip(group, (rows, columns), strict=True), strict=True):
        want = _groups(n, size)
        if scale.dim() < 2 or scale.shape[axis] != want:
            raise ValueError(
                f"scales must have {want} on axis {axis} (groups of {n} of {size}), "
                f"got shape {tuple(scale.shape)}; make them for this group and matrix"
            )
        if n not in (1, ALL):
            scale = scale.repeat_interleave(n, dim=axis).narrow(axis, 0, size)
    return scale


def _groups(n: int, size: int) -> int:
    """Groups of n on an axis. Not Parsed.scale_shape: to parse a string breaks a compiled graph."""
    return 1 if n == ALL else (size + n - 1) // n


def row_blocks(rows: int, columns: int, down: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Rows of a weight, `most` values at a time but whole groups of `down` rows at least, and the
    groups that they are."""
    count = max(1, most // max(1, down * columns))
    for first in range(0, _groups(down, rows), count):
        yield slice(first * down, min((first + count) * down, rows)), slice(first, first + count)


def global_scale_of(x: Tensor, format: Format, *, by_row: bool = False) -> Tensor:
    """The global scale, one float32, that makes the largest block scale of x the largest float8; or
    that of each row of [R, D], as if it were alone."""
    x = x.float().abs()
    whole = x.reshape(1, -1) if x.numel() else x.new_zeros(1, 1)
    amax = x.amax(-1) if by_row else whole.amax()
    largest_scale = torch.finfo(SCALES[format.scale]).max
    # By a tensor, as below.
    return (amax / amax.new_full((), format.largest * largest_scale)).clamp(min=SMALLEST_SCALE)


SCALE_RULES = ("floor", "ceil")


def check_scale_rule(scale_rule: str, format: Format) -> None:
    """Raise ValueError unless the scales of a format can be chosen by this rule."""
    check_choice("scale_rule", scale_rule, SCALE_RULES)
    if scale_rule != "floor" and format.scale != "e8m0":
        raise ValueError(
            f"scale_rule {scale_rule!r} is for e8m0 scales, but {format.name} has scales of "
            f"{format.scale}; leave it out"
        )


def quantize(
    x: Tensor,
    format: Format,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    scale_rule: str = "floor",
) -> Quantized:
    """Round [..., rows, columns] to a format: x is close to (code - zero) * scale * global_scale.

    x: float32, bfloat16 or float16 with any leading axes, columns a multiple of the values that are
    packed together. Without `scale` every group gets its own, from its largest magnitude amax:

        float scales    amax / largest, at least 1e-12 (float16: the smallest normal), rounded to
                        the scale's dtype, then divided by
        e8m0            2**(floor(log2 amax) - top_exponent): MX 1.0, section 6.3; with the
                        scale_rule "ceil" 2**ceil(log2(amax / largest)), by which nothing saturates
        float8_e4m3fn   amax / largest / global_scale (NVFP4); a scale that rounds to 0 codes 0
        zero point      (hi - lo) / highest, where [lo, hi] are the group's values and 0;
                        zero = round(-lo / scale), code = round(x / scale) + zero

    Symmetric integers use the codes from -highest to highest. Whatever exceeds the range, also
    because its scale was rounded down, saturates. NaN or an infinity in a group makes its scale NaN
    and so the whole group. A `scale` that is given (static; one value, or [..., row groups, column
    groups] in the scale's dtype) is used as it is: then infinities saturate and NaN is coded as
    `encode` does. global_scale: float32 multiplier, one value or one for each leading index.

    Raises ValueError or TypeError for wrong shapes or dtypes, for a global scale that the format
    lacks, and for a scale_rule that is not for its scales.
    """
    check_scale_rule(scale_rule, format)
    if x.dim() < 2 or x.dtype not in FLOATS:
        raise ValueError(
            f"x must be float32, bfloat16 or float16 [..., rows, columns], "
            f"got {x.dtype} of shape {tuple(x.shape)}; convert or reshape it"
        )
    x = x.float()
    common = _global(global_scale, format, x)
    if scale is None:
        scale = _dynamic_scale(x, format, common, scale_rule)
    else:
        scale = _static_scale(x, format, scale)
    ratio = _divide(x, scale, format, common)
    zero = None
    if format.has_zero:
        zero = _zero_point(x, scale, format)
        ratio = ratio.round() + expand(zero, format.group, *x.shape[-2:])
    elif format.integer is not None:
        ratio = ratio.clamp(-format.largest, format.largest)
    values = pack(encode(ratio, format.element), format.element)
    return Quantized(values=values, scale=scale, zero=zero)


def dequantize(
    values: Tensor,
    scale: Tensor,
    format: Format,
    zero: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> Tensor:
    """The float32 matrix [..., rows, columns] that packed values stand for.

    (code - zero) * scale * global_scale, multiplied from left to right: the first product is exact
    for 8-bit scales. Shapes and dtypes are those of `quantize`. Raises ValueError if they do not
    fit, and for a zero point or a global scale that the format lacks, or a zero point left out.
    """
    codes = unpack(values, format.element)
    common = _global(global_scale, format, codes)
    if (zero is not None) != format.has_zero:
        raise ValueError(
            f"{format.name} {'wants a' if format.has_zero else 'has no'} zero point, "
            f"got {'one' if zero is not None else 'none'}; choose an element that fits"
        )
    _check_dtype(scale, format)
    x = decode(codes, format.element)
    rows, columns = x.shape[-2:]
    if zero is not None:
        x = x - expand(zero, format.group, rows, columns).float()
    x = x * expand(decode_scale(scale, format.scale), format.group, rows, columns)
    return x if common is None else x * common


def _global(global_scale: Tensor | None, format: Format, x: Tensor) -> Tensor | None:
    """The global scale, broadcast against x."""
    if global_scale is None:
        return None
    if not format.has_global_scale:
        raise ValueError(f"{format.name} has no global scale, got one; fold it into the scales")
    if global_scale.shape == x.shape[:-2]:  # asked first, as it is known of sizes that vary
        return global_scale.float()[..., None, None]
    if global_scale.numel() != 1:
        raise ValueError(
            f"global_scale must be one value or have shape {tuple(x.shape[:-2])}, "
            f"got shape {tuple(global_scale.shape)}; give one for each leading index"
        )
    return global_scale.float().reshape(())


def _check_dtype(scale: Tensor, format: Format) -> None:
    if scale.dtype != SCALES[format.scale]:
        raise TypeError(
            f"scales of {format.name} must be {SCALES[format.scale]}, got {scale.dtype}; "
            f"convert them with encode_scale"
        )


def _static_scale(x: Tensor, format: Format, scale: Tensor) -> Tensor:
    _check_dtype(scale, format)
    groups = [_groups(n, size) for n, size in zip(format.group, x.shape[-2:], strict=True)]
    shape = (*x.shape[:-2], *groups)
    if scale.numel() != 1 and scale.shape != shape:
        raise ValueError(
            f"scale must be one value or have shape {shape}, got shape {tuple(scale.shape)}; "
            f"give one for each group of {format.name}"
        )
    return scale if scale.shape == shape else scale.reshape(()).expand(shape).contiguous()


def _grouped(x: Tensor, format: Format) -> Tensor:
    """[..., row groups, rows of one, column groups, columns of one]; padded with zeros."""
    rows, columns = x.shape[-2:]
    down, across = format.group
    down = max(rows, 1) if down == ALL else down
    across = max(columns, 1) if across == ALL else across
    row_groups, column_groups = _groups(format.group[0], rows), _groups(format.group[1], columns)
    missing = (row_groups * down - rows, column_groups * across - columns)
    if any(missing):
        x = pad(x, (0, missing[1], 0, missing[0]))
    return x.reshape(*x.shape[:-2], row_groups, down, column_groups, across)


def _dynamic_scale(x: Tensor, format: Format, common: Tensor | None, scale_rule: str) -> Tensor:
    """Scales of all groups, in the format's dtype."""
    if format.has_zero:
        assert format.integer is not None
        groups = _grouped(x, format)
        low, high = groups.amin((-3, -1)).clamp(max=0), groups.amax((-3, -1)).clamp(min=0)
        # Halved, because the difference of two finite values may not be finite.
        amax, largest = high / 2 - low / 2, format.integer.highest / 2
    elif format.in_blocks:  # whose own scales do it all
        amax = _grouped(x.abs(), format).amax((-3, -1))
        return encode_scale(torch.where(amax.isfinite(), 1.0, torch.nan), format.scale)
    else:
        amax, largest = _grouped(x.abs(), format).amax((-3, -1)), format.largest
    if format.scale == "e8m0" and scale_rule == "ceil":
        exact = amax / amax.new_full((), largest)
        code = encode_scale(exact, "e8m0").int()
        # 0 decodes to 2**-127, though all smaller scales have that code, too.
        raised = code + (exact > decode_scale(code, "e8m0"))
        return torch.where(exact.isfinite(), raised, E8M0_NAN).to(torch.uint8)
    if format.scale == "e8m0":
        assert format.minifloat is not None
        code = encode_scale(amax, "e8m0").int()
        lowered = (code - format.minifloat.top_exponent).clamp(min=0)
        return torch.where(code == E8M0_NAN, code, lowered).to(torch.uint8)
    # By a tensor: CUDA multiplies by the inverse of a number, which is off by a bit.
    scale = amax / amax.new_full((), largest)
    if common is not None:
        scale = (scale / common).nan_to_num(0.0)  # 0 / 0: of an expert of zeros
    info = torch.finfo(SCALES[format.scale])
    smallest = {"float16": info.smallest_normal, "float8_e4m3fn": 0.0}
    scale = scale.clamp(smallest.get(format.scale, SMALLEST_SCALE), info.max)
    # Saturated scales of finite values are right, but an infinity must not vanish.
    return encode_scale(torch.where(amax.isfinite(), scale, torch.nan), format.scale)


def _zero_point(x: Tensor, scale: Tensor, format: Format) -> Tensor:
    low = _grouped(x, format).amin((-3, -1)).clamp(max=0)
    return encode(-low / scale.float(), format.element)


def _divide(x: Tensor, scale: Tensor, format: Format, common: Tensor | None) -> Tensor:
    """x / (scale * global_scale), where a divisor of zero gives zero."""
    rows, columns = x.shape[-2:]
    if format.scale == "e8m0":
        # 2**-127 is subnormal, which some devices read as zero; its inverse is an ordinary number.
        inverse = decode_scale((2 * E8M0_BIAS - scale.int()) & 0xFF, "e8m0")
        return x * expand(inverse, format.group, rows, columns)
    divisor = scale.float() if common is None else scale.float() * common
    divisor = expand(divisor, format.group, rows, columns)
    return torch.where((divisor == 0) & ~x.isnan(), 0.0, x / divisor)
