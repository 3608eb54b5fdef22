"""Elements and their decoders as another package registers them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.compiler.config
import triton
import triton.language as tl

from moe_ops.fake_impls.formats import Storage
from moe_ops.quant.elements.kinds import Integer, Minifloat
from moe_ops.quant.register import forget_format, register_format


@triton.jit
def codes_of(words, VALUES: tl.constexpr, BITS: tl.constexpr):
    at = (BITS * tl.arange(0, VALUES))[None, None, :]
    codes = ((words[:, :, None] >> at) & (2**BITS - 1)).to(tl.int32)
    return tl.reshape(codes, (words.shape[0], words.shape[1] * VALUES))


@triton.jit
def int2(words):
    return (codes_of(words, 4, 2) - 2).to(tl.float32)


@triton.jit
def uint3(words):
    return codes_of(words, 8, 3).to(tl.float32)


@triton.jit
def float5(words):
    codes = codes_of(words, 8, 5)
    magnitude = ((codes & 15) << 21).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    return tl.where(codes < 16, magnitude, -magnitude)


@triton.jit
def float8(words):
    magnitude = ((words & 127) << 20).to(tl.float32, bitcast=True) * 6.646139978924579e35  # 2**119
    value = tl.where(words < 128, magnitude, -magnitude)
    return tl.where(words == 128, float("nan"), value)


@triton.jit
def of_another_shape(words):
    return words.to(tl.float32)


NO_FUNCTION = 7
HERE = "tests.kernels.decoders"
INT2 = Integer(
    name="int2", storage=Storage(dtype=torch.uint8, values=4), lowest=-2, highest=1, offset=2,
    triton_decoder=f"{HERE}:int2",
)  # fmt: skip
UINT3 = Integer(
    name="uint3", storage=Storage(dtype=torch.uint8, values=8, units=3), lowest=0, highest=7,
    zero_point=True, triton_decoder=f"{HERE}:uint3",
)  # fmt: skip
FLOAT5 = Minifloat(
    name="float5_e2m2", storage=Storage(dtype=torch.uint8, values=8, units=5), exponent_bits=2,
    mantissa_bits=2, bias=1, largest=7.0, top_exponent=2, triton_decoder=f"{HERE}:float5",
)  # fmt: skip
FLOAT8 = Minifloat(
    name="float8_e4m3fnuz", storage=Storage(dtype=torch.float8_e4m3fnuz), exponent_bits=4,
    mantissa_bits=3, bias=8, largest=240.0, top_exponent=7, triton_decoder=f"{HERE}:float8",
)  # fmt: skip


@contextmanager
def registered(*elements: Any, **changes: Any) -> Iterator[None]:
    """With elements of other packages, which may be changed first."""
    with torch.compiler.config.patch(cache_key_tag=""):
        made = [replace(element, **changes) for element in elements]
        for element in made:
            register_format(element)
        try:
            yield
        finally:
            for element in made:
                forget_format(element.name)
