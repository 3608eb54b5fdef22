"""What kernels of other libraries take of static scales: factors of both products of experts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

BLOCK = 128  # experts of a program


@triton.jit(do_not_specialize=["E"])
def static_factors_kernel(
    x_scale_ptr, h_scale_ptr, w13_scale_ptr, w2_scale_ptr, first_ptr, second_ptr, inverse_ptr, E,
    stride_h, stride_13, stride_2, EACH: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BE experts. EACH: the second input has a scale for each of them, else one."""
    take_turn(PDL)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = e < E
    of_h = e * (stride_h if EACH else 0)
    x_scale, h_scale = tl.load(x_scale_ptr), tl.load(h_scale_ptr + of_h, inside, other=1.0)
    first = tl.load(w13_scale_ptr + e * stride_13, inside, other=0.0) * x_scale
    second = tl.load(w2_scale_ptr + e * stride_2, inside, other=0.0) * h_scale
    tl.store(first_ptr + e, first, inside)
    tl.store(second_ptr + e, second, inside)
    inverse = tl.div_rn(tl.full((BE,), 1.0, tl.float32), h_scale)
    tl.store(inverse_ptr + (e if EACH else e * 0), inverse, inside if EACH else e == 0)


@on_its_device
def static_factors(
    x_scale: Tensor, h_scale: Tensor, w13_scale_EFG: Tensor, w2_scale_EDG: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """w13_scale · x_scale [E], w2_scale · h_scale [E] and 1 / h_scale, to the bit, in one launch.

    x_scale has one element, h_scale one or [E], and the scales of weights one for each expert, all
    in float32. With one element the reciprocal has no dimension."""
    E, each = w13_scale_EFG.shape[0], h_scale.numel() > 1
    first_E, second_E = x_scale.new_empty(E), x_scale.new_empty(E)
    inverse = x_scale.new_empty(E if each else ())
    launch(
        static_factors_kernel, (triton.cdiv(E, BLOCK),), x_scale, h_scale, w13_scale_EFG,
        w2_scale_EDG, first_E, second_E, inverse, E, h_scale.stride(0) if each else 0,
        w13_scale_EFG.stride(0), w2_scale_EDG.stride(0), EACH=each, BE=BLOCK,
        num_warps=1, **pdl_options(x_scale),
    )  # fmt: skip
    return first_E, second_E, inverse
