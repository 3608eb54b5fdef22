"""Whether Triton kernels run where a tensor is."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

LEAST_CAPABILITY, LEAST_FLOAT8, HOPPER = (8, 0), (8, 9), (9, 0)
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    return None


def refuse_device(t: Tensor, least: tuple[int, int] = LEAST_CAPABILITY) -> str | None:
    """Why kernels cannot run where a tensor is, or None."""
    if unavailable() is not None:
        return unavailable()
    if t.device.type == "cuda":
        capability = torch.cuda.get_device_capability(t.device)
        if capability < least:
            wanted, got = (".".join(map(str, version)) for version in (least, capability))
            return f"needs compute capability {wanted}, got {got}"
    return None


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
