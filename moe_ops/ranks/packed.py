"""Rows of several tensors as one row of bytes, so that one collective carries them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16  # bytes; the widest load of a GPU
# What rows are filled with that hold no token: -1 in integers, NaN in floats that have one.
FILL = 0xFF


def pack(parts: Sequence[Tensor]) -> Tensor:
    """uint8 [T, bytes]: the rows of tensors [T, n] side by side, each from an aligned byte on."""
    return torch.cat([_padded(as_bytes(part)) for part in parts], 1)


def unpack(packed_GB: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors [G, n] in packed rows, each as wide and of the dtype of the one in its place."""
    found, start = [], 0
    for t in like:
        stop = start + t.shape[1] * t.dtype.itemsize
        # A copy each: what an op returns must not lie in one memory.
        part = packed_GB[:, start:stop].clone(memory_format=torch.contiguous_format)
        found.append(part.view(-1).view(t.dtype).view(packed_GB.shape[0], t.shape[1]))
        start = stop + -stop % ALIGNMENT
    return found


def filled(packed_TB: Tensor, rows: int) -> Tensor:
    """Packed rows with more of them, that hold no token, behind."""
    return F.pad(packed_TB, (0, 0, 0, rows - packed_TB.shape[0]), value=FILL)


def as_bytes(t: Tensor) -> Tensor:
    """The rows of a tensor [T, n] as uint8, which every collective takes."""
    # Flat: an axis of one element may have any stride, and torch would not view it as bytes.
    return t.contiguous().view(-1).view(torch.uint8).view(t.shape[0], t.shape[1] * t.dtype.itemsize)


def row_bytes(fields: Sequence[tuple[int, torch.dtype]]) -> int:
    """The bytes of a packed row, given the width and the dtype of each part."""
    sizes = (width * dtype.itemsize for width, dtype in fields)
    return sum(size + -size % ALIGNMENT for size in sizes)


def _padded(bytes_TB: Tensor) -> Tensor:
    return F.pad(bytes_TB, (0, -bytes_TB.shape[1] % ALIGNMENT))
