"""A stand-in for FlashInfer: its signatures, and the mathematics of the layouts that they are
given, read element by element as FlashInfer's documents say. It shares no code with moe_ops.

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

__version__ = "0.7.2.post1"
__all__ = ["SfLayout", "autotune", "calls", "fp4_quantize", "fused_moe"]


def fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    nvfp4_4over6: object = None,
) -> tuple[Tensor, Tensor]:
    """Codes of four bits, and linear scales; x is about codes * scales / global_scale."""
    assert global_scale is not None and global_scale.shape == (1,)
    require_dense(input)
    assert sf_vec_size == 16 and not is_sf_swizzled_layout and not is_global_scale_inversed
    return nvfp4_codes(input.float() * global_scale)


profile = Held()  # of what was measured


@contextlib.contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | None = None,
    tuning_buckets: tuple[int, ...] | None = None,
    round_up: bool | None = None,
    skip_ops: str | set[str] | None = None,
    cuda_graph_profile_replays: int | None = None,
) -> Iterator[None]:
    given = {"tune_mode": tune_mode, "cache": cache, "tuning_buckets": tuning_buckets}
    calls.append(("autotune", given))
    profile.write(torch.zeros(1))
    yield
    profile.write(torch.ones(1))
