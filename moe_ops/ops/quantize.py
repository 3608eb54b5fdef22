"""Quantisation of activations: from floats to 8-bit values and the scales that undo it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.shapes import FLOATS, check_choice, check_devices, check_tensor
from moe_ops.spec import op

# The largest finite magnitude of each format.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# A row of zeros still needs a scale that can be divided by.
SMALLEST_SCALE = 1e-12


def check(
    x_RD: Tensor, scale: Tensor | None = None, format: str = "float8_e4m3fn", group: int = -1
) -> None:
    """Raise ValueError or TypeError unless `quantize` takes these arguments."""
    check_tensor("x_RD", x_RD, 2, FLOATS)
    check_choice("format", format, tuple(LARGEST))
    if group < -1:
        raise ValueError(
            f"group={group} must be a group size, -1 for one scale a row or 0 for one scale in all"
        )
    if scale is not None:
        if group != 0:
            raise ValueError(
                f"a static scale goes with group=0 (one scale in all), got group={group}"
            )
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(
                f"scale must be one float32, got {tuple(scale.shape)} of {scale.dtype}"
            )
        check_devices(x_RD, scale=scale)


@op(check=check)
def quantize(
    x_RD: Tensor, scale: Tensor | None = None, format: str = "float8_e4m3fn", group: int = -1
) -> tuple[Tensor, Tensor]:
    """Round x to an 8-bit format. Returns (q_RD, scale_RG) with x close to q * scale.

    A scale covers a whole row (group=-1, shape [R, 1]), `group` columns of a row ([R, ceil(D /
    group)]), or the whole tensor (group=0, [1, 1]), where it may also be given (static). A dynamic
    scale is the largest magnitude it covers over the format's largest finite value (448 for
    float8_e4m3fn, 57344 for float8_e5m2, 127 for int8). q is x / scale, saturated to the format's
    range and rounded half to even.

    x_RD: float [R, D]. scale: float32 multiplier, q in the format's dtype. R = 0 gives empty
    results. Raises ValueError or TypeError for wrong shapes, dtypes, devices, formats or groups.

    Source of the float8 formats: arXiv:2209.05433.
    """
    x = x_RD.float()
    R, D = x.shape
    largest = LARGEST[format]
    if group == 0:
        if scale is None:
            top = x.abs().amax() if x.numel() else x.new_zeros(())
            scale_RG = (top / largest).clamp(min=SMALLEST_SCALE).reshape(1, 1)
        else:
            scale_RG = scale.reshape(1, 1).clone()
        scale_RD = scale_RG
    else:
        width = group if group > 0 else max(D, 1)
        G = -(-D // width)
        padded = torch.nn.functional.pad(x.abs(), (0, G * width - D)).view(R, G, width)
        scale_RG = (padded.amax(-1) / largest).clamp(min=SMALLEST_SCALE)
        scale_RD = scale_RG.repeat_interleave(width, dim=1)[:, :D]
    q = (x / scale_RD).clamp(-largest, largest)
    if format == "int8":
        return q.round().to(torch.int8), scale_RG
    return q.to(getattr(torch, format)), scale_RG


quantize.fake(fake_impls.quantize)
