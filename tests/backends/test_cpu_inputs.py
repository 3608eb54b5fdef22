"""Quantised inputs on the CPU: codes and scales to the bit, products, static scales, NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import experts
from moe_ops.kernels.cpu import quantized as kernels
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import ACTIVATIONS, BF16, F32, TOL, Case, assert_close
from tests.backends.code_layers import CASE, ODD, by_instructions, calls_apart, layer_of, run

# Several groups of 128 columns, the last span of the second weight shorter than the first one's.
BLOCKS = Case(name="blocks", T=24, E=4, K=2, D=384, I=256)
INT8 = [(w, x) for w in ("int8:row", "int8:tensor") for x in ("int8:row", "int8:tensor")]
FLOAT8 = [
    ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    ("float8_e4m3fn:tensor", "float8_e4m3fn:tensor"),
    ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
]
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
of_int8 = by_instructions("AVX512", "AVX_VNNI", "AVX2", "PLAIN")
of_float8 = by_instructions("PLAIN")


def check(call: dict[str, Any], what: str) -> None:
    element = Format.of(call["x_format"]).parsed.storage.dtype
    assert_close(run(call), experts.reference(**call), TOL["experts", element], what)


def case_of(x_format: str, whole: Case = CASE) -> Case:
    return BLOCKS if "128" in x_format else whole


@of_int8
@each_dtype
def test_int8_is_multiplied_as_it_is_defined(dtype: torch.dtype, instructions: str) -> None:
    for weights, inputs in INT8:
        for case in (CASE, ODD):
            check(layer_of(case, weights, dtype, x_format=inputs), f"{weights}, {inputs}")


@of_float8
@each_dtype
def test_float8_is_multiplied_as_it_is_defined(dtype: torch.dtype, instructions: str) -> None:
    for weights, inputs in FLOAT8:
        case = case_of(inputs)
        for each in (case, replace(case, T=64)):  # of few rows an expert, and of many
            check(layer_of(each, weights, dtype, x_format=inputs), f"{weights}, {inputs}, {each.T}")


@pytest.mark.every
@each_dtype
@pytest.mark.parametrize("weights", ["mxfp4", "int8:row", "uint4:row"])
def test_weights_of_other_types_go_with_float8(weights: str, dtype: torch.dtype) -> None:
    for inputs in ("float8_e4m3fn:row", "float8_e4m3fn:tensor"):
        for T in (24, 64):
            call = layer_of(replace(CASE, T=T), weights, dtype, x_format=inputs)
            check(call, f"{weights}, {inputs}, {T} tokens")


def edges(element: str, n: int, dtype: torch.dtype) -> Tensor:
    """Rows of codes, of halves between them, of random numbers, and of the largest and smallest."""
    found = Format.of(f"{element}:row")
    values = packing.decode(torch.arange(256, dtype=torch.uint8).view(found.parsed.storage.dtype),
                            element).nan_to_num(0).clamp(-found.largest, found.largest)  # fmt: skip
    codes = values.sort().values[-n:]
    halves = (codes[1:] + codes[:-1]) / 2
    rows = [codes, torch.cat((codes[-1:], halves)), torch.zeros(n)]
    rows += [torch.randn(n) * 10.0**power for power in (-30, -11, 0, 10)]
    return torch.stack([*rows, -codes, torch.cat((codes[:1].abs(), -halves))]).to(dtype)


def seen(x_TD: Tensor, x_format: str, **static: Tensor) -> dict[str, Any]:
    """A layer of one expert whose products are with the unit matrix: nothing is summed."""
    n, T = x_TD.shape[1], x_TD.shape[0]
    element = Format.of(x_format).element
    unit = packing.encode(torch.eye(n), element)
    group = x_format.replace(":1x128", ":128x128")
    found = packing.quantize(torch.eye(n), Format.of(group))
    ones = torch.ones_like(found.scale)[None]
    return {
        "x_TD": x_TD, "weights_TK": torch.ones(T, 1), "ids_TK": torch.zeros(T, 1).int(),
        "w13_EFD": torch.cat((unit, unit))[None], "w2_EDI": unit[None], "kind": "relu2",
        "w13_scale_EFG": ones if "tensor" in group else torch.cat((ones, ones), 1),
        "w2_scale_EDG": ones, "w_format": group, "x_format": x_format, **static,
    }  # fmt: skip


def check_codes(element: str, group: str, dtype: torch.dtype) -> None:
    x_TD = edges(element, 128, dtype)
    static = {"x_scale": torch.tensor(0.37), "h_scale": torch.tensor([3.0])}
    given = static if group == "static" else {}
    call = seen(x_TD, f"{element}:{'tensor' if group == 'static' else group}", **given)
    for x in (x_TD, -x_TD):  # the activation is 0 where these are negative
        call["x_TD"] = x
        want = experts.reference(**call)
        torch.testing.assert_close(run(call), want, rtol=0, atol=0)
        assert bool((want > 0).any()) and bool(want.isfinite().all())


@of_int8
@each_dtype
@pytest.mark.parametrize("group", ["row", "tensor", "static"])
def test_int8_codes_and_scales_are_those_of_the_definition_to_the_bit(
    group: str, dtype: torch.dtype, instructions: str
) -> None:
    check_codes("int8", group, dtype)


@of_float8
@each_dtype
@pytest.mark.parametrize("group", ["row", "tensor", "static", "1x128"])
def test_float8_codes_and_scales_are_those_of_the_definition_to_the_bit(
    group: str, dtype: torch.dtype, instructions: str
) -> None:
    check_codes("float8_e4m3fn", group, dtype)


@of_int8
def test_the_largest_sums_fit(instructions: str) -> None:
    width = kernels.MOST_INTEGERS
    call = {
        "x_TD": torch.full((1, width), -1.0), "weights_TK": torch.ones(1, 1),
        "ids_TK": torch.zeros(1, 1).int(), "kind": "relu2", "gated": False,
        "w13_EFD": torch.full((1, 1, width), -128, dtype=torch.int8),
        "w2_EDI": torch.ones(1, width, 1, dtype=torch.int8), "w13_scale_EFG": torch.ones(1, 1, 1),
        "w2_scale_EDG": torch.ones(1, width, 1), "w_format": "int8:row", "x_format": "int8:row",
    }  # fmt: skip
    want = torch.full((1, width), (128.0 * width) ** 2)
    torch.testing.assert_close(run(call), want, rtol=TOL["experts", F32].rel, atol=0)
    wider = torch.nn.functional.pad
    for name, pad in (("x_TD", (0, 1)), ("w13_EFD", (0, 1)), ("w2_EDI", (0, 0, 0, 1)),
                      ("w2_scale_EDG", (0, 0, 0, 1))):  # fmt: skip
        call[name] = wider(call[name], pad)
    assert experts.refusals(**call)["cpu"] == (
        f"sums up to {width} products in int32, got {width + 1}"
    )


@pytest.mark.parametrize(("weights", "inputs"), [INT8[1], FLOAT8[1]], ids=["int8", "float8"])
def test_static_scales_may_be_those_of_experts(weights: str, inputs: str) -> None:
    call = layer_of(CASE, weights, BF16, x_format=inputs)
    largest = Format.of(inputs).largest
    each = torch.tensor([1.0, 2.0, 3.0, 4.0]) / largest
    one = torch.tensor([[2.0 / largest]])
    for x_scale, h_scale in ((one, one), (each, None), (None, each), (each, each.flip(0))):
        check(call | {"x_scale": x_scale, "h_scale": h_scale}, f"{x_scale}, {h_scale}")
    zero = call | {"x_scale": torch.zeros(1)}
    assert torch.equal(run(zero), experts.reference(**zero))


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [("int8:row", "int8:row"), ("int8:row", "int8:tensor"), FLOAT8[2]],
    ids=["int8", "int8_tensor", "float8_blocks"],
)
def test_activations_biases_and_maps_are_those_of_the_definition(weights: str, inputs: str) -> None:
    for name, activation in ACTIVATIONS.items():
        gated = activation.get("gated", True)
        check(layer_of(case_of(inputs), weights, F32, gated, inputs) | activation, name)
    call = layer_of(case_of(inputs), weights, BF16, x_format=inputs)
    check(call | {"b13_EF": None, "b2_ED": None}, "without biases")
    for name, apart in calls_apart(call).items():
        check(apart, name)
    none = {n: call[n][:0] for n in ("x_TD", "weights_TK", "ids_TK")}
    assert run(call | none).shape == (0, call["x_TD"].shape[1])


@of_int8
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("group", ["row", "tensor"])
def test_what_is_not_finite_stays_where_scales_are(
    group: str, value: float, instructions: str
) -> None:
    call = layer_of(CASE, "int8:row", BF16, x_format=f"int8:{group}")
    want = run(call)
    call["x_TD"][3, 7] = value
    got = run(call)
    if group == "tensor":
        assert bool(got.isnan().all())
        return
    others = torch.arange(CASE.T) != 3
    assert bool(got[3].isnan().all())
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize(("weights", "inputs"), [INT8[0], INT8[1]], ids=["row", "tensor"])
def test_threads_do_not_change_a_bit(weights: str, inputs: str, threads: None) -> None:
    call = layer_of(CASE, weights, BF16, x_format=inputs)
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(run(call))
    assert all(torch.equal(results[0], other) for other in results[1:])


REFUSED = {
    "weights": (
        "int4:row",
        "int8:row",
        "multiplies int8 inputs and weights of one scale a row or ",
    ),
    "groups": ("int8:1x32", "int8:1x32", "tensor each, got int8:1x32 and int8:1x32"),
    "small": ("float8_e4m3fn:64x64", "float8_e4m3fn:1x64", "wants groups of inputs that are those"),
    "element": ("mxfp4", "mxfp4", "quantises inputs to int8 and float8_e4m3fn with float32 scales"),
}


@pytest.mark.parametrize(("weights", "inputs", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_inputs_are_refused(weights: str, inputs: str, reason: str) -> None:
    call = layer_of(Case(name="even", T=3, E=2, K=1, D=128, I=64), weights, BF16, x_format=inputs)
    assert reason in (experts.refusals(**call)["cpu"] or "")
