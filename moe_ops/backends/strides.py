"""Tensors in the order in which kernels read them; copies of those that are not."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

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
