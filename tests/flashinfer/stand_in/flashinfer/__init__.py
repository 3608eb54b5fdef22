"""A stand-in for FlashInfer: the signatures of the version that is installed (`signed.py`), and the
mathematics of the layouts that its functions are given, read element by element as FlashInfer's
documents say. It shares no code with moe_ops.

It computes in float32 what the kernels would from codes, scales and factors, so that weights in
another order, factors of another convention and scales that were not moved give other numbers.
`calls` tells what was called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from flashinfer import fused_moe
from flashinfer.fused_moe.kinds import SfLayout
from flashinfer.fused_moe.numbers import Held, calls, nvfp4_codes, require_dense
from flashinfer.signed import VERSION, signed

__version__ = VERSION
__all__ = ["SfLayout", "autotune", "calls", "fp4_quantize", "fused_moe"]


@signed("fp4_quantize")
def fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None,
    sf_vec_size: int,
    is_sf_swizzled_layout: bool,
    is_global_scale_inversed: bool,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """Codes of four bits, and linear scales; x is about codes * scales / global_scale."""
    assert global_scale is not None and global_scale.shape == (1,)
    require_dense(input)
    assert sf_vec_size == 16 and not is_sf_swizzled_layout and not is_global_scale_inversed
    return nvfp4_codes(input.float() * global_scale)


profile = Held()  # of what was measured


@signed("autotune")
@contextlib.contextmanager
def autotune(**given: object) -> Iterator[None]:
    calls.append(("autotune", given))
    profile.write(torch.zeros(1))
    yield
    profile.write(torch.ones(1))
