"""What a GPU can run. Those of AMD are "cuda" too where torch is built for ROCm (HIP), and what
they say of themselves means something else: the capability of a gfx90a is 9.0, as of Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

Capability = tuple[int, int]

NONE: Capability = (0, 0)


def is_amd() -> bool:
    """Whether "cuda" means GPUs of AMD: torch is built for one kind or the other."""
    return torch.version.hip is not None


def capability(device: torch.device | int | None = None) -> Capability:
    """The compute capability of a GPU of NVIDIA, by default of the current one; (0, 0), which is
    below all of them, for one of AMD."""
    if is_amd():
        return NONE
    ask = torch.cuda.get_device_capability
    index = device if isinstance(device, int) or device is None else device.index
    return ask(device) if index is None else _kept(ask, index)


@functools.cache
def _kept(ask: Callable[[int], Capability], index: int) -> Capability:
    """What torch says of a GPU takes ten microseconds, and every call of an op asks for it."""
    return ask(index)


def described(device: torch.device | int | None = None) -> str:
    """A GPU as refusals call it: its compute capability, or what else it is."""
    if is_amd():
        is_ = torch.cuda.get_device_properties(device)
        architecture = str(getattr(is_, "gcnArchName", "unknown")).partition(":")[0]
        return f"a GPU of AMD ({architecture})"
    return dotted(capability(device))


def dotted(numbers: Capability) -> str:
    return ".".join(map(str, numbers))
