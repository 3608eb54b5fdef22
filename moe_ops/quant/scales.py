"""Scales: what values they may have, and from what checkpoints hold to what the ops multiply by.

These functions run when weights are loaded or checked: they wait for the device. Values of tensors
on the meta device cannot be read, and are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.quant.formats import Format
from moe_ops.quant.packing import E8M0_NAN, decode_scale
from moe_ops.shapes import FLOATS, check_tensor


def check_scale_values(name: str, scale: Tensor) -> None:
    """Raise ValueError unless every scale is finite and above 0; codes of e8m0 are numbers.

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


def check_zero_values(name: str, zero: Tensor, format: Format) -> None:
    """Raise ValueError unless the zero points are codes of the format's element."""
    assert format.integer is not None
    highest = format.integer.highest
    if not zero.is_meta and int(zero.max()) > highest:
        raise ValueError(
            f"{name} must lie in 0 to {highest}, the codes of {format.element}, "
            f"got {int(zero.max())}; unpack it first"
        )


def inverse(scale: Tensor) -> Tensor:
    """The multiplier of a scale that decodes by division: 1 / scale in float32.

    So are `weight_global_scale` and `input_global_scale` of the NVFP4 checkpoints that
    llm-compressor writes (format nvfp4-pack-quantized of compressed-tensors). Raises ValueError for
    a scale that is 0 or not finite, or so small that its inverse is not finite; TypeError for codes
    (such as e8m0 bytes).
    """
    if not scale.is_floating_point():
        raise TypeError(
            f"scale must be floating point, got {str(scale.dtype).removeprefix('torch.')}; "
            "decode e8m0 bytes with e8m0_to_float32"
        )
    value = scale.float()
    inverted = value.reciprocal()
    bad = ~(value.isfinite() & inverted.isfinite())
    if bad.any():
        raise ValueError(
            f"scale {float(value[bad][0])} has no finite inverse; every scale of the checkpoint "
            "must be finite and not 0"
        )
    return inverted


def e8m0_to_float32(scale: Tensor) -> Tensor:
    """Powers of two from their exponents: 2^(code - 127), and NaN for 255. Returns float32.

    scale: uint8 or float8_e8m0fnu, any shape. Code 0 is 2^-127, a subnormal float32. Source: OCP
    Microscaling (MX) 1.0, section 5.4.1.
    """
    check_tensor("scale", scale, scale.dim(), (torch.uint8, torch.float8_e8m0fnu))
    return decode_scale(scale.view(torch.uint8), "e8m0")


def float32_to_e8m0(scale: Tensor) -> Tensor:
    """Exponents of powers of two: log2(scale) + 127. Returns uint8.

    scale: float32, bfloat16 or float16, any shape. Raises ValueError for a value that is not a
    power of two from 2^-127 to 2^127 (NaN is none), because a rounded scale changes the weights.
    """
    check_tensor("scale", scale, scale.dim(), FLOATS)
    bits = scale.float().view(torch.int32)
    lowest = bits == 1 << 22  # 2^-127 is the one power of two with exponent field 0 that counts
    exponent = bits >> 23  # negative where the sign is set
    exact = lowest | ((bits & 0x7FFFFF) == 0) & (exponent > 0) & (exponent < 255)
    if not exact.all():
        first = float(scale[~exact][0])
        raise ValueError(
            f"scale {first} is not a power of two from 2^-127 to 2^127; re-quantise the weights "
            "with e8m0 scales, since rounding a scale silently changes them"
        )
    return exponent.to(torch.uint8)
