"""The multiples that widths of a layer are to be for kernels to read and send them fast."""

from __future__ import annotations

import math

import torch

from moe_ops.backends.strides import WORD
from moe_ops.quant.formats import Format
from moe_ops.registry.backend import ALIGNMENT, Multiples


def whole_rows(w_format: str, x_format: str, dtype: torch.dtype) -> Multiples:
    """The multiples of widths by which rows of weights and of inputs begin at multiples of 16
    bytes, where kernels read fastest."""
    found = Multiples()
    for format in (w_format, x_format, ""):
        values, nbytes = 1, dtype.itemsize
        if format:
            storage = Format.of(format).parsed.storage
            values, nbytes = storage.values, storage.units * storage.dtype.itemsize
        each = values * (ALIGNMENT // math.gcd(ALIGNMENT, nbytes))
        found |= Multiples(hidden=each, intermediate=each)
    return found


def whole_words(w_format: str, x_format: str, dtype: torch.dtype) -> Multiples:
    """The multiples of a width by which tokens are sent in words."""
    return Multiples(hidden=WORD // math.gcd(WORD, dtype.itemsize))
