"""Tensors in the order in which kernels read them; copies of those that are not."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from moe_ops.quant.formats import Format
from moe_ops.registry.backend import ALIGNMENT, Multiples

T = TypeVar("T", Tensor, Tensor | None)
WORD = 4  # bytes


def with_rows(t: T) -> T:
    """A tensor, if any, whose rows are contiguous."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def contiguous(t: T) -> T:
    return t if t is None or t.is_contiguous() else t.contiguous()


def in_words(codes: Tensor) -> Tensor:
    """Contiguous codes of 8 bits that begin with a word, as kernels copy them a word at a time."""
    codes = contiguous(codes)
    return codes if codes.storage_offset() % WORD == 0 else codes.clone()


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
