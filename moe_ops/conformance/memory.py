"""Copies of arguments in memory in which all that is no value is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_ops.registry.backend import ALIGNMENT

AROUND = 64  # bytes before and after a tensor, a multiple of `ALIGNMENT`
NAN = 255  # as a byte of any float; -1 as integers


def surrounded(value: Any, device: torch.device) -> Any:
    """A copy of an argument on a device: tensors keep their strides and where they begin modulo 16
    bytes, and lie in memory of their own, whose other bytes are NaN."""
    if isinstance(value, (list, tuple)):
        return type(value)(surrounded(v, device) for v in value)
    if not isinstance(value, Tensor):
        return value
    size, spans = value.itemsize, zip(value.shape, value.stride(), strict=True)
    length = (sum((n - 1) * step for n, step in spans) + 1) * size if value.numel() else 0
    begin = AROUND + value.storage_offset() * size % ALIGNMENT
    memory = torch.full((begin + length + AROUND,), NAN, dtype=torch.uint8, device=device)
    made = torch.empty(0, dtype=value.dtype, device=device).set_(
        memory.untyped_storage(), begin // size, value.shape, value.stride()
    )
    # What is expanded has one value in several places, and is written to one of them.
    once = tuple(slice(1 if step == 0 else None) for step in value.stride())
    made[once].copy_(value[once])
    return made


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument, of arguments or of a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors(v)


def memory_of(t: Tensor) -> Tensor:
    """A copy of all bytes of the memory that a tensor lies in."""
    storage = t.untyped_storage()
    every = torch.empty(0, dtype=torch.uint8, device=t.device)
    return every.set_(storage, 0, (storage.nbytes(),), (1,)).clone()


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor's values, for a comparison in which NaN equals itself."""
    return t.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
