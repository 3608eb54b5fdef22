"""Scales: from what checkpoints hold to what the ops multiply by.

All but `product` and `one_input_scale` run when weights are loaded: they wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.checks.shapes import FLOATS, check_tensor
from moe_ops.quant.packing import E8M0_NAN, decode_scale

FLOAT8_NAN = 0x7F  # of float8_e4m3fn, without its sign


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


def wrong_scale(scale: Tensor, kind: str, *, signed: bool = False) -> str | None:
    """What in the scales of weights is no positive finite number, or None; kind: a key of `SCALES`.

    Two kinds say it otherwise: e8m0 has one code for NaN and none for 0, and a float8_e4m3fn scale
    of 0 is what a block of zeros, or of nearly that, has under a global scale. signed: 0 and less
    are right, too, as in GGUF, where a scale has the sign of the largest value.
    """
    if not scale.numel():
        return None
    if kind in ("e8m0", "float8_e4m3fn"):
        codes = int(scale.view(torch.uint8).max())
        if kind == "e8m0":
            return "NaN" if codes == E8M0_NAN else None
        # Those from the sign bit on are negative, and NaN is the last one before it.
        return None if codes < FLOAT8_NAN else "a negative number" if codes > FLOAT8_NAN else "NaN"
    lowest, highest = (float(t) for t in torch.aminmax(scale))
    if (lowest > float("-inf") if signed else lowest > 0) and highest < float("inf"):
        return None
    return str(lowest if lowest <= 0 else highest)


# The largest zero point that codes may have where kernels take less than its byte holds: codes of
# four bits less one are numbers up to 16, which float8 holds.
MOST_ZERO = {"uint4": 16}


def wrong_zero(zero: Tensor, element: str) -> str | None:
    """What zero points of weights no element type has, or None."""
    most = MOST_ZERO.get(element)
    if most is None or not zero.numel() or int(zero.max()) <= most:
        return None
    return f"a zero point of {int(zero.max())}, but those of {element} are 0 to {most}"


LEAST_INPUT_SCALE = 1e-12  # its reciprocal is finite


def product(global_scale_E: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """The factor of each expert's product, of nvfp4: that of its weight, or the two of gate and up,
    times that of the input where it is static: one value, or one for each expert.
    """
    if global_scale_E is None or scale is None:
        return global_scale_E
    return global_scale_E * _beside(scale, global_scale_E)


def one_input_scale(scale: Tensor, global_scale_E: Tensor) -> tuple[Tensor, Tensor]:
    """A static global scale for the inputs of all experts, [1], and the factors of the product.

    `global_scale_E`, [E] or [E, 2], contains the scale of each expert's input. The largest scale
    loses nothing of any expert's range.
    """
    if scale.numel() == 1:
        return scale.reshape(1), global_scale_E.contiguous()
    one = scale.max().clamp(min=LEAST_INPUT_SCALE).reshape(1)
    return one, global_scale_E / _beside(scale, global_scale_E) * one


def _beside(scale: Tensor, factors: Tensor) -> Tensor:
    """Scales of experts as they are multiplied with one factor for each expert, or several."""
    return scale if factors.dim() == 1 else scale[:, None]
