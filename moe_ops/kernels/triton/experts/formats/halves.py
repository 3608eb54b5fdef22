"""Two halves of 16 bits in each int32, in which decoders compute two values at once."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.experts.formats.float8 import INTERPRETED


@triton.jit
def and_or(a, mask, b):
    """(a & mask) | b of int32: one instruction, where the compiler makes two."""
    if INTERPRETED:
        return (a & mask) | b
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [a, mask, b],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def half_of(pair, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """One of the two halves of an int32."""
    bits = pair >> 16 if HIGH else pair & 0xFFFF
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def bits_of(half):
    return half.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def pair_fma(a, b, c, DTYPE: tl.constexpr):
    """a * b + c of the two halves in each int32."""
    if INTERPRETED:
        b, c = a * 0 + b, a * 0 + c
        low = half_of(a, False, DTYPE).to(tl.float32) * half_of(b, False, DTYPE).to(tl.float32)
        low += half_of(c, False, DTYPE).to(tl.float32)
        high = half_of(a, True, DTYPE).to(tl.float32) * half_of(b, True, DTYPE).to(tl.float32)
        high += half_of(c, True, DTYPE).to(tl.float32)
        return bits_of(low.to(DTYPE)) | (bits_of(high.to(DTYPE)) << 16)
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
