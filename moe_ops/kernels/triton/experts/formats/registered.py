"""Codes of elements that another package registered: their bytes, and the decoder that it brings.

A decoder is a `triton.jit` function of words, [M, N] of int32, or of int64 if a word has more than
four bytes. A word is as many bytes as values share, the first byte in its lowest bits, and with it
the first value. The decoder gives what the codes stand for, floats [M, N * values] in the order of
columns, before zero points and scales; those of a word of zeros are finite.

W is the format of a weight, a `RegisteredWeight` of `moe_ops.kernels.triton`.
"""

from __future__ import annotations

import importlib
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface


def decoder_at(place: str) -> Any:
    """The `triton.jit` function at "module:function". Raises TypeError if there is none."""
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, KernelInterface):
        raise TypeError(
            f"the triton_decoder {place!r} must be a triton.jit function, got "
            f"{type(found).__name__}; name one that its module has"
        )
    return found


@triton.jit
def words_of(at_MN, inside_MN, W: tl.constexpr, POLICY: tl.constexpr):
    """[M, N]: the words that begin at these places; zeros outside."""
    UNITS: tl.constexpr = W.units
    DTYPE: tl.constexpr = tl.int32 if UNITS <= 4 else tl.int64
    w_MN = tl.load(at_MN, mask=inside_MN, other=0, eviction_policy=POLICY).to(DTYPE)
    for unit in tl.static_range(1, UNITS):
        byte_MN = tl.load(at_MN + unit, mask=inside_MN, other=0, eviction_policy=POLICY)
        w_MN |= byte_MN.to(DTYPE) << (8 * unit)
    return w_MN


@triton.jit
def values_of_words(w_MN, W: tl.constexpr):
    """[M, N * values] in float32: what words stand for before zero points and scales."""
    M: tl.constexpr = w_MN.shape[0]
    COLUMNS: tl.constexpr = w_MN.shape[1] * W.values
    value_MD = W.decoder(w_MN)
    tl.static_assert(
        len(value_MD.shape) == 2 and value_MD.shape[0] == M and value_MD.shape[1] == COLUMNS,
        "a decoder of words [M, N] gives floats [M, N * values] in the order of columns",
    )
    return value_MD.to(tl.float32)
