"""Invariant calls for `offline.py` to compile: variants that other calls do not launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from moe_ops.backends.triton import run_experts
from moe_ops.kernels.triton.decode import linears, one_query
from moe_ops.ops.experts import ExpertsCall
from moe_ops.registry.invariance import invariant
from moe_ops.testing import LAYERS
from tests.kernels.offline_codes import quantized_call
from tests.kernels.offline_floats import layer_call

# Weights, inputs, least capability: each way to multiply, and each number of bits.
FORMATS = [
    ("int4:1x128:bfloat16", "", 80), ("uint4:1x128:bfloat16", "", 80), ("int4:row", "", 80),
    ("mxfp4", "mxfp8", 80), ("nvfp4", "nvfp4", 80), ("mxfp6_e3m2", "", 80),
    ("float8_e4m3fn:row", "", 89), ("int8:row", "", 80), ("int8:row", "int8:row", 80),
    ("float8_e4m3fn:row", "float8_e4m3fn:row", 89),
    ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128", 89),
]  # fmt: skip
OF_8_BITS = [f[:2] for f in FORMATS[-3:]]
HUGE = ("mxfp4", "nvfp4", "int4:1x128:bfloat16", "uint4:1x32:bfloat16", "mxfp6_e3m2")
CASE = LAYERS["gpt_oss_20b"]
ATTENTION = [(8, 4, 128, 4096, False), (8, 8, 64, 1024, True), (1, 16, 256, 512, False)]


def calls_invariant(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for backend, T in (("tiny", 1), ("rows", 1), ("rows", 64)):
        call = layer_call(CASE, T, False)
        yield f"invariant {backend} {T}", functools.partial(run, backend, call)
    full = layer_call(LAYERS["qwen3_next"], 1, True)
    yield "invariant tiny 1 full", functools.partial(run, "tiny", full)
    for w_format, x_format, least in FORMATS:
        if capability < least:
            continue
        if capability == 90 and (not x_format or (w_format, x_format) in OF_8_BITS):
            call = quantized_call(CASE, 1, w_format, x_format)
            yield f"invariant token {w_format} {x_format}", functools.partial(run, "tiny", call)
        for T in (1, 8, 64, 512):
            call = quantized_call(CASE, T, w_format, x_format)
            name = f"invariant rows {T} {w_format} {x_format}"
            yield name, functools.partial(run, "rows", call)
    # One token of experts with many columns.
    for w_format in HUGE if capability == 90 else ():
        call = quantized_call(LAYERS["mixtral_8x7b"], 1, w_format, "")
        yield f"invariant wide token {w_format}", functools.partial(run, "tiny", call)
    for w_format in ("q4_k", "q6_k"):  # whose blocks do not divide the widths of that case
        call = quantized_call(LAYERS["qwen3_30b"], 64, w_format, "")
        yield f"invariant rows 64 {w_format}", functools.partial(run, "rows", call)
    for heads, group, size, slots, sinks in ATTENTION:
        yield (
            f"invariant one query {size}",
            functools.partial(attended, heads, group, size, slots, sinks),
        )
    for T in (1, 8):
        yield f"invariant linears {T}", functools.partial(projected, T)


def run(kernel: str, call: ExpertsCall) -> None:
    with invariant():
        run_experts(kernel, call)


def attended(heads: int, group: int, size: int, slots: int, sinks: bool) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    k, mask = empty(4, heads, slots, size), torch.empty(4, slots, dtype=torch.bool, device="meta")
    sinks_H = empty(heads * group) if sinks else None
    q = empty(4, heads * group, size)
    one_query.attend(q, k, k, mask, 0.088, sinks_H, invariant=True)


def projected(T: int) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    weights = [empty(n, 2048) for n in (4096, 512, 512)]
    args = empty(T, 2048), None, empty(2048), 1e-6, weights, [None] * 3
    linears.run_normed(*args, invariant=True)
