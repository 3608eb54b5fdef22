"""Calls on quantised weights for `offline.py` to compile the kernels of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_inputs import inputs_of
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.operands.prequantized import decode, in_rows
from moe_ops.kernels.triton.static_factors import static_factors
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.quantize import quantize
from moe_ops.quant.formats import Format
from moe_ops.testing import GPT_OSS, LAYERS, Case

HALF_STEP = Case(name="half_step", T=1, E=8, K=2, D=64, I=32)  # widths that a step is above
# Of weights and inputs with a scale a row or tensor; and how many static scales these have.
BY_ROW = [
    ("float8_e4m3fn:row", "float8_e4m3fn:row", 0, 89), ("int8:row", "int8:row", 0, 80),
    ("int8:tensor", "int8:tensor", 0, 80),
    ("int8:row", "int8:tensor", 1, 80), ("float8_e4m3fn:row", "float8_e4m3fn:tensor", 2, 89),
]  # fmt: skip

# Whose decoders are functions: blocks with scales of their own, and a table.
DECODED = ("q4_k", "q5_k", "q6_k", "nf4")
QUANTIZED = [
    ("int8:tensor", 80), ("int8:1x32", 80), ("float8_e4m3fn:row", 89), ("float8_e4m3fn:1x128", 89),
    ("mxfp8", 89), ("mxfp6_e3m2", 80), ("mxfp4", 80), ("nvfp4", 89),
]  # fmt: skip

# The other paths of many rows are compiled by `offline_grouped.py`.
PATHS = {"grouped": "grouped/plain"}


def calls_decoded(capability: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls on codes whose decoders are functions, with few, some and many rows."""
    case = LAYERS["qwen3_30b"]
    for w_format in DECODED:
        for backend, T in (
            ("tiny", 1),
            ("tiny", 4),
            ("rows", 64),
            ("rows", 512),
            ("grouped", 4096),
        ):
            call = functools.partial(quantized_layer, case, backend, T, w_format, "")
            yield f"{backend} {T} {w_format}", call


def calls_by_row(capability: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls whose inputs have a scale a row, and `quantize`, which makes such inputs."""
    case, most = LAYERS["gpt_oss_20b"], LAYERS["qwen3_next"]
    for w_format, x_format, static, least in BY_ROW:
        if capability < least:
            continue
        # Every tile for those of rows.
        rows = (16, 256, 1024, 4096) if x_format.endswith("row") else (64, 1024)
        given = [(case, "tiny", 1), (case, "tiny", 4), *((case, "rows", n) for n in rows)]
        if x_format.endswith("row"):
            given += [(most, "tiny", 1), (HALF_STEP, "tiny", 1), (HALF_STEP, "tiny", 4)]
        for layer, backend, T in given:
            args = (layer, backend, T, w_format, x_format, static)
            call = functools.partial(quantized_layer, *args)
            yield f"{backend} {T} {w_format} {x_format} {static}", call
    for format, least in QUANTIZED:
        if capability >= least:
            yield f"quantize {format}", functools.partial(quantized, format)
    yield "tokens in codes", functools.partial(tokens_in_codes, case)
    for h_scales in (1, case.E):
        yield f"{h_scales} static factors", functools.partial(factors, case.E, h_scales)


def quantized(format: str) -> None:
    for width in (768, 2880):
        x_RD = torch.empty(4096, width, dtype=torch.bfloat16, device="meta")
        quantize.backends["triton"].run(quantize.call(x_RD, format))


def tokens_in_codes(case: Any) -> None:
    """Tokens that came as codes, in the rows of their experts and decoded."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    inverse_R = empty(1024 * case.K, dtype=torch.int32)
    for G in (1, (case.D + 127) // 128):
        in_rows(empty(1024, case.D, dtype=torch.int8), empty(1024, G), inverse_R, case.K)
    for x_format in ("mxfp8", "mxfp8_e5m2", "float8_e4m3fn:row", "int8:row"):
        parsed = Format.of(x_format).parsed
        scale_TG = empty(*parsed.scale_shape(1024, case.D), dtype=parsed.scale_dtype)
        codes = Codes(
            w13_scale_EFG=scale_TG, w2_scale_EDG=scale_TG, w13_zero_EFG=None, w2_zero_EDG=None,
            weight=weight_of("mxfp4", x_format), inputs=inputs_of("mxfp4", x_format),
            x_scale_TG=scale_TG, result=torch.bfloat16,
        )  # fmt: skip
        decode(empty(1024, case.D, dtype=parsed.storage.dtype), codes)


def factors(E: int, h_scales: int) -> None:
    x_scale, h_scale = (torch.empty(n, device="meta") for n in (1, h_scales))
    w13, w2 = (torch.empty(E, 1, 1, device="meta") for _ in range(2))
    static_factors(x_scale, h_scale, w13, w2)


def quantized_layer(
    case: Any, backend: str, T: int, w_format: str, x_format: str, static: int = 0,
    full: bool = False,
) -> None:  # fmt: skip
    """`full`: with biases, a residual and the activation of GPT-OSS, as its layers in a step."""
    call, residual_TD = quantized_call(case, T, w_format, x_format, static, backend == "rows"), None
    if full:
        biases = [
            torch.empty(t.shape[:2], dtype=call.dtype, device="meta")
            for t in (call.w13_EFD, call.w2_EDI)
        ]
        call = replace(call, b13_EF=biases[0], b2_ED=biases[1], **GPT_OSS)
        residual_TD = torch.empty_like(call.x_TD)
    run_experts(PATHS.get(backend, backend), call, residual_TD)


def quantized_call(
    case: Any, T: int, w_format: str, x_format: str, static: int = 0, each: bool = False
) -> ExpertsCall:
    """static: 1 for one scale of tokens and one of h, 2 for those of experts; of tokens too if
    `each`."""
    format = Format.of(w_format)
    parsed, dtype = format.parsed, torch.bfloat16

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def weight(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        groups = (case.E, *parsed.scale_shape(rows, columns))
        w = empty(case.E, rows, parsed.packed(columns), dtype=parsed.storage.dtype)
        zero = empty(*groups, dtype=torch.uint8) if format.has_zero else None
        return w, empty(*groups, dtype=parsed.scale_dtype), zero

    w13, w13_scale, w13_zero = weight(2 * case.I, case.D)
    w2, w2_scale, w2_zero = weight(case.D, case.I)
    # Of tokens, of h: kernels of few tokens take one scale for those of all experts.
    scales: list[Tensor | None] = [None, None]
    if static:
        of_h = case.E if static == 2 else 1
        scales = [empty(n, dtype=torch.float32) for n in (1, of_h)]
    return ExpertsCall(
        x_TD=empty(T, case.D),
        weights_TK=empty(T, case.K, dtype=torch.float32),
        ids_TK=empty(T, case.K, dtype=torch.int32),
        w13_EFD=w13,
        w2_EDI=w2,
        w13_scale_EFG=w13_scale,
        w2_scale_EDG=w2_scale,
        w13_zero_EFG=w13_zero,
        w2_zero_EDG=w2_zero,
        global_scale13_E=empty(case.E, dtype=torch.float32) if format.has_global_scale else None,
        global_scale2_E=empty(case.E, dtype=torch.float32) if format.has_global_scale else None,
        x_scale=scales[each],
        h_scale=scales[1],
        w_format=w_format,
        x_format=x_format,
    )
