"""Linear layers of codes for `offline.py` to compile the kernels of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_ops.backends.triton_linears import (
    most_rows,
    multiply_decoded,
    multiply_few,
    multiply_normed,
)
from moe_ops.decode_ops.normed_quantized_linears import NormedQuantizedLinearsCall
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall
from moe_ops.quant.formats import Format

# Formats, and the capability that loads their codes: every decoder, and every way to scale.
FORMATS = (
    ("float8_e4m3fn:row", 89), ("float8_e4m3fn:128x128", 89), ("mxfp8", 89), ("int8:row", 80),
    ("uint8:1x32", 80), ("int4:row", 80), ("int4:1x128", 80), ("uint4:1x64", 80),
    ("uint4:1x32:float16", 80), ("mxfp4", 80), ("nvfp4", 80), ("mxfp6_e3m2", 80),
    ("mxfp6_e2m3", 80),
)  # fmt: skip
MANY = {(2048,): (256,), (4096, 512, 512): (512,)}  # rows, of these rows of weights
SIZES = (((4096, 512, 512), 2048), ((2048,), 4096), ((20000,), 2880), ((151936,), 2048))


def calls_of_linears(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for format, least in FORMATS:
        if capability < least:
            continue
        for sizes, K in SIZES:
            for T in (1, 8, 16, 32, 64, *MANY.get(sizes, ())):
                call = functools.partial(run, T, sizes, K, format)
                yield f"quantized linears {T} {sizes} {K} {format}", call
            for T, residual in ((1, False), (1, True), (8, True)):
                call = functools.partial(run_normed, T, sizes, K, format, residual)
                yield f"normed quantized linears {T} {sizes} {K} {format} {residual}", call
        yield f"decoded {format}", functools.partial(run, 1024, *SIZES[0], format)


def run(T: int, sizes: tuple[int, ...], K: int, format: str) -> None:
    call = call_on_meta(T, sizes, K, format)
    (multiply_few if most_rows(call) >= T else multiply_decoded)(call)


def run_normed(T: int, sizes: tuple[int, ...], K: int, format: str, residual: bool) -> None:
    call = call_on_meta(T, sizes, K, format)
    lists = (call.weights, call.scales, call.zeros, call.global_scales, call.biases)
    added = torch.empty_like(call.x_TK) if residual else None
    gain = torch.empty(K, dtype=torch.bfloat16, device="meta")
    shift = 1.0 if residual else None
    multiply_normed(NormedQuantizedLinearsCall(call.x_TK, added, gain, 1e-6, *lists, format, shift))


def call_on_meta(T: int, sizes: tuple[int, ...], K: int, format: str) -> QuantizedLinearsCall:
    found, parsed = Format.of(format), Format.of(format).parsed

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    groups = [parsed.scale_shape(n, K) for n in sizes]
    return QuantizedLinearsCall(
        x_TK=empty(T, K),
        weights=[empty(n, parsed.packed(K), dtype=parsed.storage.dtype) for n in sizes],
        scales=[empty(*g, dtype=parsed.scale_dtype) for g in groups],
        zeros=[empty(*g, dtype=torch.uint8) if found.has_zero else None for g in groups],
        global_scales=[
            empty(1, dtype=torch.float32) if found.has_global_scale else None for _ in sizes
        ],
        biases=[empty(n) for n in sizes],
        w_format=format,
    )
