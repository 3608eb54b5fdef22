"""Quantised weights for tests of kernels, and one product of them by the kernels' own function."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.triton_formats import weight_of
from moe_ops.fake_impls.formats import ELEMENTS
from moe_ops.kernels.triton import Act, in_words
from moe_ops.kernels.triton.experts.formats.codes import Codes, as_stored, scales_as_stored
from moe_ops.kernels.triton.experts.formats.four_bits import decoded
from moe_ops.kernels.triton.experts.formats.scales import rescaled
from moe_ops.kernels.triton.experts.operands.permuted import arrange
from moe_ops.kernels.triton.experts.products.block_steps import add_product
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import DEVICE

STEP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weight of one expert or more, [e, rows, columns packed]."""

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    format: str

    def decoded(self) -> Tensor:
        """The float32 matrix of the first expert."""
        zero = None if self.zero is None else self.zero[0]
        return packing.dequantize(self.values[0], self.scale[0], Format.of(self.format), zero)


def quantized(w13: Tensor, w2: Tensor, w_format: str) -> dict[str, Any]:
    """Two stacked weights as arguments of `experts`, the weights themselves as w13 and w2."""
    format = Format.of(w_format)
    commons: list[Tensor | None] = [None, None]
    if format.has_global_scale:
        commons = [torch.stack([packing.global_scale_of(e, format) for e in w]) for w in (w13, w2)]
    a, b = (
        packing.quantize(w, format, global_scale=common)
        for w, common in zip((w13, w2), commons, strict=True)
    )
    return {
        "w13": a.values, "w2": b.values, "w13_scale_EFG": a.scale, "w2_scale_EDG": b.scale,
        "w13_zero_EFG": a.zero, "w2_zero_EDG": b.zero, "w_format": w_format,
        "global_scale13_E": commons[0], "global_scale2_E": commons[1],
    }  # fmt: skip


def any_codes(w_format: str, rows: int, columns: int) -> Weights:
    """Every code of the element that is a number, in any order; scales are powers of two, by which
    its values stay exact in 16 bits."""
    format = Format.of(w_format)
    bits = int(format.bits)
    codes = torch.randint(2**bits, (1, rows, columns), dtype=torch.uint8, device=DEVICE)
    codes.view(-1)[: 2**bits] = torch.arange(2**bits, dtype=torch.uint8, device=DEVICE)
    if bits == 8:
        if format.element == "float8_e4m3fn":
            codes[(codes & 0x7F) == 0x7F] = 0  # NaN
        elif format.element == "float8_e5m2":
            codes[(codes & 0x7F) > 0x7B] = 0  # infinities, NaN
        values = codes.view(ELEMENTS[format.element].dtype)
    else:
        values = packing.pack(codes, format.element)
    shape = (1, *format.parsed.scale_shape(rows, columns))
    most = 1 if format.element == "float8_e5m2" else 2  # which float16 would not hold
    scale = torch.randint(-3, most, shape, device=DEVICE).float().exp2()
    zero = torch.randint(2**bits, shape, dtype=torch.uint8, device=DEVICE)
    scale = packing.encode_scale(scale, format.scale)
    return Weights(
        values=values, scale=scale, zero=zero if format.has_zero else None, format=w_format
    )


def unfilled(formats: tuple[str, str], sizes: tuple[int, int, int]) -> Any:
    """A gated layer of (E, D, I) as the tables of tiles look at it: without its weights."""
    names = ("w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG", "w2_zero_EDG")
    none: dict[str, Any] = {name: torch.empty(0) for name in names}
    codes = Codes(**none, weight=weight_of(*formats))
    return SimpleNamespace(codes=codes, sizes=sizes, act=Act("silu"))


@triton.jit
def product_kernel(
    w_ptr, w_scale_ptr, w_zero_ptr, x_ptr, out_ptr, stride_w, stride_x,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, ROWS)
    n = tl.arange(0, TOKENS)
    acc_MN = tl.zeros((ROWS, TOKENS), tl.float32)
    w_M1, x_1N = (w_ptr + m * stride_w)[:, None], (x_ptr + n * stride_x)[None, :]
    acc_MN = add_product(
        acc_MN, w_M1, 1, w_scale_ptr, w_zero_ptr, 0 * m, m, m < ROWS, x_1N, None, n, n < TOKENS,
        ROWS, COLUMNS, STEP, W, "", False,
    )  # fmt: skip
    acc_MN = rescaled(acc_MN, W, x_ptr.dtype.element_ty)
    tl.store(out_ptr + m[:, None] * TOKENS + n[None, :], acc_MN)


def product(weights: Weights, x_ND: Tensor) -> Tensor:
    """The first expert's weight times tokens, [rows, tokens] in float32."""
    rows, (N, D) = weights.values.shape[1], x_ND.shape
    weight = weight_of(weights.format, "")
    out = torch.empty(rows, N, device=x_ND.device)
    if in_words(weight):
        x_ND = arrange(x_ND, weight)
    w = as_stored(weights.values, weight)
    product_kernel[(1,)](
        w, scales_as_stored(weights.scale, weight), weights.zero, x_ND, out, w.stride(1),
        x_ND.stride(0),
        ROWS=rows, COLUMNS=D, TOKENS=N, STEP=STEP, W=weight,
    )  # fmt: skip
    return out


@triton.jit
def bits_kernel(w_ptr, out_ptr, N: tl.constexpr):
    """Word i's nibbles j and j + 4 as bfloat16, before scales: out[j, i]."""
    i = tl.arange(0, N)
    w = tl.load(w_ptr + i)
    for j in tl.static_range(4):
        tl.store(out_ptr + j * N + i, decoded(w, j, 0, 0, True, False, tl.bfloat16))


def nibbles_as_bfloat16(w_N: Tensor) -> Tensor:
    """[4, N] pairs of halves of words of float4, a power of two of N, before they are scaled."""
    out_JN = w_N.new_empty(4, len(w_N))
    bits_kernel[(1,)](w_N, out_JN, N=len(w_N))
    return out_JN
