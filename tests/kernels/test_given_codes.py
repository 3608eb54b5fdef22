"""Kernels that start from tokens in codes give the bits of those that quantise the tokens, in
Triton's interpreter without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_inputs import inputs_of
from moe_ops.backends.triton_paths import Path
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.operands.fake_quantized import emulate
from moe_ops.kernels.triton.experts.operands.group_scales import quantize_sorted, quantize_tokens
from moe_ops.kernels.triton.experts.operands.prequantized import decode, in_rows
from moe_ops.kernels.triton.experts.operands.row_scales import quantize_x
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, DEVICE, F16, Case
from tests.chosen import one_in
from tests.kernels.test_quantized_experts import ODD, call_of, run

# Formats of weights and of inputs, and the kernels that run both in the interpreter.
LAYERS = {
    "float8 rows": ("float8_e4m3fn:row", "float8_e4m3fn:row", ("tiny", "rows")),
    "int8 rows": ("int8:row", "int8:row", ("tiny", "rows")),
    "float8 groups": ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128", ("tiny", "rows")),
    "mxfp8": ("mxfp8", "mxfp8", ("rows", "grouped")),
    "e5m2": ("mxfp4", "mxfp8_e5m2", ("rows",)),
    "float8 rows, emulated": ("mxfp4", "float8_e4m3fn:row", ("rows", "grouped")),
    "float8 groups, emulated": ("int4:1x32", "float8_e4m3fn:1x32", ("rows", "grouped")),
}
GRID = [(name, kernel) for name, (*_, kernels) in LAYERS.items() for kernel in kernels]
# One of each kernel that starts from codes, and one that decodes them.
USUAL = (*((name, k) for name in ("float8 groups", "int8 rows") for k in ("tiny", "rows")),
         ("mxfp8", "grouped"))  # fmt: skip


def of_codes(call: ExpertsCall) -> ExpertsCall:
    """The call of the same tokens in codes."""
    format = Format.of(call.x_format)
    done = packing.quantize(call.x_TD, format)
    name = str(call.x_TD.dtype).removeprefix("torch.")
    given = replace(call, x_TD=done.values, x_scale_TG=done.scale, out_dtype=name)
    experts.check(given)
    return given


@one_in(
    2,
    pytest.mark.parametrize(
        ("name", "kernel"),
        [pytest.param(*pair, marks=[] if pair in USUAL else pytest.mark.every) for pair in GRID],
        ids=str,
    ),
)
def test_a_layer(name: str, kernel: str) -> None:
    w_format, x_format, _ = LAYERS[name]
    # In float16: the interpreter multiplies no bfloat16, and one token takes other ways.
    for T in (1, 5):
        call = call_of(replace(ODD, T=T), w_format, x_format, dtype=F16, biases=True)
        if T > 1:
            call.ids_TK[3, 0] = -1
        given = of_codes(call)
        got, want = (run(f"triton.{kernel}", c) for c in (given, call))
        assert got.dtype is want.dtype is F16
        assert torch.equal(got, want), f"{T} tokens"


def unequal(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, one of zeros."""
    sizes = torch.logspace(-4, 3, T, device=DEVICE)
    x_TD = (torch.randn(T, D, device=DEVICE) * sizes[:, None]).to(dtype)
    x_TD[1] = 0
    return x_TD


def placed(rows: Tensor, inverse_R: Tensor) -> Tensor:
    """The rows that hold a pair, in the order of pairs."""
    return rows[inverse_R[inverse_R >= 0].long()]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_kernels_quantize_groups_as_the_op_does(dtype: torch.dtype) -> None:
    x_TD = unequal(7, 320, dtype)
    weight = weight_of("float8_e4m3fn:128x128", "float8_e4m3fn:1x128")
    done = packing.quantize(x_TD, Format.of("float8_e4m3fn:1x128"))
    codes_TD, scale_TG = quantize_tokens(x_TD, weight)
    assert torch.equal(codes_TD.view(torch.uint8), done.values.view(torch.uint8))
    assert torch.equal(scale_TG, done.scale)


def routed(T: int) -> tuple[Tensor, Tensor]:
    """Ids, some of them nowhere, and the row of each pair."""
    ids_TK = torch.randint(-1, 4, (T, 2), device=DEVICE)
    return ids_TK, sort_pairs(ids_TK, 4, None)[1]


@pytest.mark.parametrize("T", [3, 21])
def test_groups_are_copied_to_the_rows_where_they_would_be_made(T: int) -> None:
    x_TD, (_, inverse_R) = unequal(T, 400, BF16), routed(T)
    done = packing.quantize(x_TD, Format.of("float8_e4m3fn:1x128"))
    codes_RD, scale_GR = in_rows(done.values, done.scale, inverse_R, 2)
    want_RD, want_GR = quantize_sorted(x_TD, inverse_R, 2, 128)
    assert codes_RD.shape == want_RD.shape and scale_GR.shape == want_GR.shape
    got, want = (placed(c.view(torch.uint8), inverse_R) for c in (codes_RD, want_RD))
    assert torch.equal(got, want)
    got, want = (placed(s.T, inverse_R) for s in (scale_GR, want_GR))
    assert torch.equal(got, want)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "int8"])
def test_rows_are_copied_to_the_rows_where_they_would_be_made(element: str) -> None:
    call = call_of(replace(ODD, T=21), f"{element}:row", f"{element}:row", dtype=F16)
    ids_TK, inverse_R = routed(21)
    named: dict[str, Any] = {
        "w13_scale_EFG": call.w13_scale_EFG, "w2_scale_EDG": call.w2_scale_EDG,
        "w13_zero_EFG": None, "w2_zero_EDG": None,
        "weight": weight_of(call.w_format, call.x_format), "scaled": "row",
    }  # fmt: skip
    given, codes = of_codes(call), Codes(**named)
    from_codes = replace(codes, x_scale_TG=given.x_scale_TG, result=F16)
    got = quantize_x(given.x_TD, from_codes, ids_TK, None, inverse_R)
    want = quantize_x(call.x_TD, codes, ids_TK, None, inverse_R)
    for g, w in zip(got, want, strict=True):
        narrow = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (g, w))
        assert torch.equal(*(placed(t, inverse_R) for t in narrow))


@pytest.mark.parametrize("formats", ["float8 rows", "float8 groups", "int8 rows"])
def test_codes_that_begin_between_words_are_copied_to_rows(formats: str) -> None:
    """As one message of codes and scales may hold them; those of one token are contiguous there."""
    call = of_codes(call_of(replace(ODD, D=512, I=448), *LAYERS[formats][:2]))
    rows = sort_pairs(call.ids_TK, ODD.E, None)[1]

    def start(x_TD: Tensor, _: Tensor, ids_TK: Tensor, layer: Any, *__: Any, **___: Any) -> Tensor:
        assert layer.codes.x_scale_TG is not None
        codes_RD, _ = in_rows(x_TD, layer.codes.x_scale_TG, rows, ids_TK.shape[1])
        return codes_RD.view(torch.uint8)

    held = torch.zeros(call.x_TD.numel() + 3, dtype=torch.uint8, device=DEVICE)[3:]
    moved = held.copy_(call.x_TD.view(torch.uint8).flatten()).view(call.x_TD.dtype)
    path = "grouped/row_scales" if "rows" in formats else "grouped/blocks"
    with patch.object(Path, "launcher", lambda self: start):
        want = run_experts(path, call)
        got = run_experts(path, replace(call, x_TD=moved.view(call.x_TD.shape)))
    assert torch.equal(placed(got, rows), placed(want, rows))


EMULATED = ("mxfp8", "mxfp8_e5m2", "float8_e4m3fn:1x64:e8m0", "float8_e4m3fn:row", "int8:row")


@pytest.mark.parametrize("x_format", EMULATED)
def test_codes_are_decoded_to_what_emulation_makes(x_format: str) -> None:
    x_TD = unequal(7, 192, F16)
    x_TD[2, 5] = float("inf")
    inputs = inputs_of("mxfp4", x_format)
    assert inputs is not None
    done = packing.quantize(x_TD, Format.of(x_format))
    scale = torch.ones(1, 1, 1, device=DEVICE)
    codes = Codes(
        w13_scale_EFG=scale, w2_scale_EDG=scale, w13_zero_EFG=None, w2_zero_EDG=None,
        weight=weight_of("mxfp4", x_format), inputs=inputs, x_scale_TG=done.scale, result=F16,
    )  # fmt: skip
    got, want = decode(done.values, codes), emulate(x_TD, 192, inputs, None)
    assert torch.equal(got.isnan(), want.isnan()) and bool(want.isnan().any())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_no_tokens() -> None:
    empty = Case(name="empty", T=0, E=3, K=2, D=160, I=96)
    got = run("triton.rows", of_codes(call_of(empty, "int8:row", "int8:row", dtype=F16)))
    assert got.shape == (0, 160) and got.dtype is F16
