"""The decoder of codes of eight bits, which come as they are."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.experts.formats.scales import spread


@triton.jit
def bytes_as(w_MD, w_zero_MG, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of eight bits as halves, which hold them, and integers less a zero point, exactly; by
    way of float32, as the direct conversion to bfloat16 takes a slow unit for every value."""
    value_MD = w_MD.to(tl.float32)
    if ELEMENT == "uint8":
        EACH: tl.constexpr = w_MD.shape[1] // w_zero_MG.shape[1]
        value_MD -= spread(w_zero_MG.to(tl.float32), EACH)
    return value_MD.to(DTYPE)
