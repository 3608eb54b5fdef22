"""Whether Triton kernels run where a tensor is."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from moe_ops.kernels import gpus

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
        return refuse_gpu(t.device, least)
    return None


def refuse_gpu(device: torch.device, least: tuple[int, int] = LEAST_CAPABILITY) -> str | None:
    """Why kernels cannot run on a GPU, or None."""
    if gpus.capability(device) < least:
        return f"needs compute capability {gpus.dotted(least)}, got {gpus.described(device)}"
    return None


def refuse_hopper(t: Tensor) -> str | None:
    """Why kernels that are written for Hopper alone do not run where a tensor is, or None."""
    if t.device.type != "cuda":
        return f"needs a GPU of compute capability {gpus.dotted(HOPPER)}, got {t.device.type}"
    return refuse_all_but_hopper(t.device)


def refuse_all_but_hopper(device: torch.device) -> str | None:
    """Why kernels that are written for Hopper alone do not run on a GPU, or None."""
    if gpus.capability(device) != HOPPER:
        return f"needs compute capability {gpus.dotted(HOPPER)}, got {gpus.described(device)}"
    return None


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
