"""The decoder of NF4: two codes in a byte, each a place in a table of 16 values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def value_of(code):
    """The values of codes, chosen by one bit after the other."""
    low = tl.where(
        code & 4 != 0,
        four(code, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        four(code, -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    )
    high = tl.where(
        code & 4 != 0,
        four(code, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        four(
            code, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
            0.33791524171829224,
        ),
    )  # fmt: skip
    return tl.where(code & 8 != 0, high, low)


@triton.jit
def four(code, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """One of four numbers by the last two bits of codes."""
    return tl.where(code & 2 != 0, tl.where(code & 1 != 0, d, c), tl.where(code & 1 != 0, b, a))


@triton.jit
def decode(words):
    """[M, N] words, here bytes, of two codes each, to the codes' values [M, 2 * N]."""
    codes = (words[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 15
    return value_of(tl.reshape(codes, (words.shape[0], 2 * words.shape[1])))
