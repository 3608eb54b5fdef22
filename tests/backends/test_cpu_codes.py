"""Quantised weights on the CPU: every format, by every set of instructions that is here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import experts
from moe_ops.backends import cpu_codes
from moe_ops.kernels.cpu import quantized as kernels
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import ACTIVATIONS, BF16, F32, TOL, Case, assert_close, float32
from tests.backends.code_layers import (
    CASE,
    MANY,
    MANY_ODD,
    ODD,
    by_format_and_instructions,
    calls_apart,
    layer_of,
    run,
)  # fmt: skip
from tests.chosen import in_turn

GROUPED = (
    "int8:1x32", "int8:1x64:bfloat16", "uint8:1x32", "int4:1x32", "int4:1x32:float16",
    "uint4:1x32", "mxfp4", "mxfp8", "float8_e4m3fn:32x32", "nf4", "nf4:1x32",
)  # fmt: skip
WHOLE = (
    "int8:row", "int8:tensor", "uint8:row", "int4:row", "int4:tensor:bfloat16", "uint4:row",
    "float8_e4m3fn:128x128", "float8_e4m3fn:row", "float8_e4m3fn:tensor", "nf4:row",
)  # fmt: skip
RAGGED = ("float8_e4m3fn:16x32", "float8_e4m3fn:128x64", *WHOLE)
INSTRUCTIONS = ("AVX512", "AVX2", "PLAIN")
each_element = by_format_and_instructions(  # but blocks, which tests/quant/test_k_quants.py has
    "row",
    [f"{e}:row" for e in kernels.ELEMENTS if not Format.of(f"{e}:row").in_blocks],
    *INSTRUCTIONS,
)


def reference(call: dict[str, Any]) -> Tensor:
    """The definition on float32 copies; scales stay as they are stored."""
    stored = {"w13_scale_EFG", "w2_scale_EDG"}
    return experts.reference(**{k: v if k in stored else float32(v) for k, v in call.items()})


def check(call: dict[str, Any], what: str) -> None:
    assert_close(run(call), reference(call), TOL["experts", call["x_TD"].dtype], what)


@each_element
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_every_format_is_multiplied_as_it_is_defined(
    row: str, dtype: torch.dtype, instructions: str
) -> None:
    cases = [(f, c) for f in (*GROUPED, *WHOLE) for c in (CASE, MANY)]
    cases += [(f, c) for f in RAGGED for c in (ODD, MANY_ODD)]
    mine = [(f, c) for f, c in cases if Format.of(f).element == Format.of(row).element]
    assert {c.name for _, c in mine} >= {CASE.name, MANY.name}
    for format, case in mine:
        check(layer_of(case, format, dtype), f"{format}, {case.name}")


@in_turn(each_element, pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"]))
def test_every_code_stands_for_its_value(row: str, dtype: torch.dtype, instructions: str) -> None:
    n, of_row = 256, Format.of(row)
    element = of_row.element
    one = packing.quantize(torch.eye(n).expand(1, n, n), of_row)
    # Token t reads column t of the second weight, whose rows begin with another code each.
    codes = (torch.arange(n)[:, None] + torch.arange(n)) % int(2**of_row.bits)
    if element == "float8_e4m3fn":
        codes = codes.where(codes & 127 != 127, 0)  # NaN
    w2 = packing.pack(codes.to(torch.uint8), element).view(of_row.parsed.storage.dtype)[None]
    zero = (torch.arange(n, dtype=torch.uint8) % 16)[None, :, None] if of_row.has_zero else None
    call = {
        "x_TD": torch.eye(n).to(dtype), "weights_TK": torch.ones(n, 1),
        "ids_TK": torch.zeros(n, 1, dtype=torch.int32), "kind": "relu2", "gated": False,
        "w13_EFD": one.values, "w13_scale_EFG": one.scale, "w13_zero_EFG": one.zero,
        "w2_EDI": w2, "w2_scale_EDG": torch.ones(1, n, 1), "w2_zero_EDG": zero,
        "w_format": of_row.name,
    }  # fmt: skip
    # One product has one rounding, whatever its size.
    rtol = TOL["expert_gemm", dtype].rel
    torch.testing.assert_close(run(call).float(), reference(call), rtol=rtol, atol=0)


@pytest.mark.parametrize("format", ["int4:1x32", "uint8:row", "float8_e4m3fn:128x128"])
def test_activations_biases_and_maps_are_those_of_the_definition(format: str) -> None:
    for name, activation in ACTIVATIONS.items():
        for case in (ODD, MANY_ODD) if "row" in format else (CASE, MANY):
            call = layer_of(case, format, F32, activation.get("gated", True))
            check(call | activation, f"{name}, {case.name}")
    call = layer_of(CASE, format, BF16)
    plain = {"b13_EF": None, "b2_ED": None, "weights_TK": call["weights_TK"].bfloat16()}
    check(call | plain, "without biases, weights in bfloat16")
    for name, apart in calls_apart(call).items():
        check(apart, name)
    check(call | {"x_TD": call["x_TD"][:0], "weights_TK": call["weights_TK"][:0],
                  "ids_TK": call["ids_TK"][:0]}, "no tokens")  # fmt: skip


@pytest.mark.parametrize("format", ["int8:row", "uint4:1x32", "float8_e4m3fn:128x128"])
def test_threads_and_other_tokens_do_not_change_a_bit(format: str, threads: None) -> None:
    for case in (CASE, MANY):
        call = layer_of(case, format, BF16)
        results = []
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(run(call))
        assert all(torch.equal(results[0], other) for other in results[1:])


@by_format_and_instructions(
    "format", ["int8:row", "uint4:1x32", "mxfp4", "float8_e4m3fn:128x128"], *INSTRUCTIONS
)
def test_nan_stays_with_its_token(format: str, instructions: str) -> None:
    for case in (CASE, MANY):
        call = layer_of(case, format, BF16)
        want = run(call)
        call["x_TD"][3, 7] = float("nan")
        got = run(call)
        others = torch.arange(case.T) != 3
        assert bool(got[3].isnan().all())
        assert torch.equal(got[others], want[others])


@by_format_and_instructions("format", ["uint4:1x32", "uint8:row", "int4:row"], *INSTRUCTIONS)
def test_infinities_reach_their_token_as_in_the_definition(format: str, instructions: str) -> None:
    for case in (CASE, MANY, ODD if "row" in format else CASE):
        call = layer_of(case, format, F32, gated=False) | {"kind": "relu2", "gated": False}
        call["x_TD"][3, 7] = float("inf")
        call["x_TD"][4, 2] = -float("inf")
        want, got = reference(call), run(call)
        assert not bool(want[3:5].isfinite().any()) and bool(want[0].isfinite().all())
        tol = TOL["experts", F32].rel * float(want[want.isfinite()].abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=tol, equal_nan=True)


@in_turn(
    by_format_and_instructions(
        "format", ["mxfp4", "mxfp8", "int4:1x64:float16", "float8_e4m3fn:32x32"], *INSTRUCTIONS
    ),
    pytest.mark.parametrize("what", ["scale", "code"]),
    pytest.mark.parametrize("case", [CASE, MANY], ids=["few", "many"]),
)
def test_nan_in_a_weight_is_nan_in_its_rows(
    case: Case, format: str, what: str, instructions: str
) -> None:
    call = layer_of(case, format, F32)
    codes, scale = call["w2_EDI"].view(torch.uint8), call["w2_scale_EDG"]
    if what == "scale":
        scale[1, 0, 1] = 255 if scale.dtype == torch.uint8 else torch.nan
    elif "8" in format:
        codes[1, 0, 33] = 0xFF  # a negative NaN
    else:
        pytest.skip("no code stands for NaN")
    want, got = reference(call), run(call)
    assert bool(want.isnan().any()) and bool(want.isfinite().any())
    tol = TOL["experts", F32].rel * float(want[want.isfinite()].abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=tol, equal_nan=True)


@in_turn(
    by_format_and_instructions(
        "formats",
        [
            ("int4:1x64:float16", ""),
            ("uint4:row", ""),
            ("float8_e4m3fn:128x128", ""),
            ("int8:row", "int8:row"),
            ("float8_e4m3fn:row", "float8_e4m3fn:row"),
        ],
        *INSTRUCTIONS,
    ),
    pytest.mark.parametrize("case", [CASE, MANY], ids=["few", "many"]),
)
def test_an_infinite_scale_is_nan_in_its_rows(
    case: Case, formats: tuple[str, str], instructions: str
) -> None:
    """As infinity times a code of zero is, and infinities of both signs are."""
    call = layer_of(case, formats[0], F32, x_format=formats[1])
    call["w2_scale_EDG"][1, 0, 0] = float("inf")
    want, got = reference(call), run(call)
    assert bool(want.isnan().any()) and bool(want.isfinite().any())
    tol = TOL["experts", torch.float8_e4m3fn if formats[1] else F32].rel
    tol *= float(want[want.isfinite()].abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=tol, equal_nan=True)


def test_rows_that_are_longer_than_they_look_are_read_in_their_places() -> None:
    call = layer_of(CASE, "int4:1x32", BF16)
    for name in ("w13_EFD", "w2_EDI"):
        t = call[name]
        call[name] = torch.nn.functional.pad(t, (1, 2, 0, 1), value=255)[:, :-1, 1:-2]
        assert torch.equal(call[name], t) and not call[name].is_contiguous()
    check(call, "padded rows")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "element": ("mxfp6_e3m2", {}, "needs weights of int8, uint8, int4, uint4, float4_e2m1, "),
    "scale": ("nvfp4", {}, "needs scales of float32, bfloat16, float16, e8m0, got float8_e4m3fn"),
    "group": ("int4:1x16", {}, "needs groups of 32, 64 or a multiple of 128 columns, or of all"),
    "column": ("float8_e4m3fn:column", {}, "columns, or of all, got 1"),
    "inputs": (
        "mxfp4",
        {"x_format": "mxfp8"},
        "quantises inputs to int8 and float8_e4m3fn with float32 scales, got mxfp8",
    ),
    "half": ("int4:1x32", {"x_TD": torch.ones(24, 416).half()}, "needs float32 or bfloat16"),
}


@pytest.mark.parametrize(("format", "change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_do_not_take_is_refused(
    format: str, change: dict[str, Any], reason: str
) -> None:
    call = layer_of(CASE, format, BF16) | change
    assert reason in (experts.refusals(**call)["cpu"] or "")


def test_scales_are_neither_copied_nor_differentiated() -> None:
    call = layer_of(CASE, "int4:1x32", BF16)
    scale = call["w2_scale_EDG"]
    strided = scale.transpose(1, 2).contiguous().transpose(1, 2)
    for t, reason in (
        (strided, "needs contiguous scales and zero points"),
        (scale.clone().requires_grad_(), "is not differentiable, and an argument requires grad"),
    ):
        assert experts.refusals(**call | {"w2_scale_EDG": t})["cpu"] == reason


def test_without_a_compiler_the_definition_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = layer_of(CASE, "int4:1x32", F32)
    monkeypatch.setattr(
        cpu_codes.kernels, "unavailable", lambda element, inputs: f"no compiler for {element}"
    )
    assert experts.refusals(**call)["cpu"] == "no compiler for int4"
    assert_close(experts(**call), reference(call), TOL["experts", F32])
