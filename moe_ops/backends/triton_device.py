"""Whether Triton kernels run where a tensor is, and tensors in the order that they read."""

from __future__ import annotations

import functools
import importlib.util
from typing import TypeVar

import torch
from torch import Tensor

LEAST_CAPABILITY, LEAST_FLOAT8, HOPPER = (8, 0), (8, 9), (9, 0)
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
T = TypeVar("T", Tensor, Tensor | None)


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


def with_rows(t: T) -> T:
    """A tensor, if any, whose rows are contiguous."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def contiguous(t: T) -> T:
    return t if t is None or t.is_contiguous() else t.contiguous()
