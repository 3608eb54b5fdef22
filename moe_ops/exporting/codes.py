"""Codes as floats by arithmetic alone: no shifts and no bits of floats, which runtimes lack.

Codes of fewer than eight bits are taken apart as numbers: a byte, or three of them, is below 2**24,
and float32 holds these, and their quotients by powers of two, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.quant.elements.kinds import Integer, Minifloat, Table
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import E8M0_BIAS, E8M0_NAN


def cannot(
    op: str, argument: str, got: object, why: str, target: str, instead: str = ""
) -> NotImplementedError:
    """The error of a table that cannot say a call of an op; `instead` is another way out."""
    do = f"{instead}, or " if instead else ""
    return NotImplementedError(
        f"moe_ops.{op}: {argument}={got!r} {why}; {do}export the call by decompositions({target!r})"
    )


def require_makeable(op: str, argument: str, format: str) -> None:
    """Raise NotImplementedError for a format whose codes are made of the bits of floats."""
    found = Format.of(format)
    bits_of = found.element_type
    if found.scale == "e8m0" or (isinstance(bits_of, Minifloat) and not bits_of.native):
        why = "rounds to codes or scales that are made of the bits of floats"
        raise cannot(op, argument, format, why, "aten")


def decode(values: Tensor, scale: Tensor | None, zero: Tensor | None, format: str) -> Tensor:
    """Stored values [..., rows, packed columns] as float32, as `packing.dequantize` has them."""
    if not format:
        return values.float()
    assert scale is not None
    found = Format.of(format)
    if found.in_blocks:
        raise NotImplementedError(
            f"blocks of {format} hold their scales as bytes of floats, which this target cannot "
            "take apart; export the model in another format, or by decompositions('aten')"
        )
    x = _of_codes(_unpacked(values, found), found)
    rows, columns = x.shape[-2:]
    if zero is not None:
        x = x - _spread(zero.float(), found.group, rows, columns)
    factor = _of_e8m0(scale.float()) if found.scale == "e8m0" else scale.float()
    return x * _spread(factor, found.group, rows, columns)


def as_indexed(values: Tensor) -> Tensor:
    """Stored values in a dtype that runtimes take rows of: floats of eight bits have no such."""
    return values.float() if values.dtype.is_floating_point and values.itemsize == 1 else values


def _unpacked(values: Tensor, format: Format) -> Tensor:
    """The codes, each as a float."""
    storage, bits = format.element_type.storage, format.bits
    if storage.values == 1:
        return values.float()
    units = values.float().unflatten(-1, (values.shape[-1] // storage.units, storage.units))
    left = units[..., 0]
    for i in range(1, storage.units):
        left = left + units[..., i] * 256.0**i
    codes = []
    for _ in range(storage.values):
        higher = (left * 0.5**bits).floor()
        codes.append(left - higher * 2.0**bits)
        left = higher
    return torch.stack(codes, -1).flatten(-2)


def _of_codes(code: Tensor, format: Format) -> Tensor:
    """The values that codes stand for."""
    element = format.element_type
    if isinstance(element, Integer):
        return code - element.offset if element.offset else code
    if isinstance(element, Table):
        return element.values(code.device)[code.long()]
    assert isinstance(element, Minifloat)
    if element.native:
        return code
    sign = (code * 0.5 ** (element.bits - 1)).floor()
    magnitude = code - sign * 2.0 ** (element.bits - 1)
    field = (magnitude * 0.5**element.mantissa_bits).floor()
    mantissa = magnitude - field * 2.0**element.mantissa_bits
    # Of a normal there is a hidden bit; subnormals have the exponent of the smallest normal.
    hidden = torch.where(field > 0, 2.0**element.mantissa_bits, 0.0)
    exponent = field.clamp(min=1.0)
    power = torch.full_like(code, 0.5 ** (element.bias + element.mantissa_bits))
    return (mantissa + hidden) * (1.0 - 2.0 * sign) * _times_power(power, exponent, bits=3)


def _of_e8m0(code: Tensor) -> Tensor:
    """2**(code - 127), and NaN for the last code."""
    smallest = torch.full_like(code, 2.0**-E8M0_BIAS)
    power = _times_power(smallest, code, bits=8)
    return torch.where(code == E8M0_NAN, torch.nan, power)


def _times_power(x: Tensor, exponent: Tensor, bits: int) -> Tensor:
    """x * 2**exponent, exactly, by a factor for each bit of a whole number in floats."""
    left = exponent
    for bit in range(bits):
        higher = (left * 0.5).floor()
        is_set = left - higher * 2.0 > 0
        # Twice a half, as 2**128 is no float32.
        half = torch.where(is_set, 2.0 ** (2**bit / 2), 1.0) if bit else None
        x = x * torch.where(is_set, 2.0, 1.0) if half is None else x * half * half
        left = higher
    return x


def _spread(scale: Tensor, group: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Scales [..., row groups, column groups] such that they broadcast against [..., rows,
    columns]."""
    for axis, n, size in ((-2, group[0], rows), (-1, group[1], columns)):
        if n > 1:
            at = scale.dim() + axis
            shape = [*scale.shape[: at + 1], n, *scale.shape[at + 1 :]]
            scale = scale.unsqueeze(at + 1).expand(shape).flatten(at, at + 1).narrow(at, 0, size)
    return scale
