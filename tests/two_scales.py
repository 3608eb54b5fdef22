"""What codes stand for where gate and up may have global scales of their own."""

from __future__ import annotations

from torch import Tensor

from moe_ops.quant import packing
from moe_ops.quant.formats import Format


def dequantize(
    codes_EFD: Tensor,
    scale_EFG: Tensor,
    format: Format,
    zero_EFG: Tensor | None,
    global_scale: Tensor | None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """`packing.dequantize`; a global scale [E, 2] is of the rows of gate, and of up."""
    if global_scale is None or global_scale.dim() == 1:
        return packing.dequantize(codes_EFD, scale_EFG, format, zero_EFG, global_scale)
    halves = (-1, 2) if interleaved else (2, -1)
    parts = [t.unflatten(1, halves) for t in (codes_EFD, scale_EFG)]
    if interleaved:
        parts = [t.transpose(1, 2) for t in parts]
    found = packing.dequantize(*parts, format, zero_EFG, global_scale)
    return (found.transpose(1, 2) if interleaved else found).flatten(1, 2)
