"""Invariant calls of experts by Triton's kernels, in its interpreter without a GPU: rows do not
depend on the batch, and every number of rows has the same arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.registry.invariance import Refused, invariant
from moe_ops.testing import BF16, DEVICE, F16, LAYERS, Case, make_layer
from tests.chosen import those_of
from tests.independent_rows import PAIRS, call_of
from tests.random_batches import OTHERS, batches, bits

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends import (
    triton_arithmetic,
    triton_hopper,
    triton_paths,
    triton_streams,
    triton_tiles,
)
from moe_ops.backends.triton import TENSORS, formats_named, layer_of, run_experts, tensors_of
from tests.kernels import offline_invariant
from tests.kernels.offline_codes import quantized_call
from tests.kernels.offline_floats import layer_call

ON_GPU = DEVICE == "cuda"
DTYPE = BF16 if ON_GPU else F16  # the interpreter multiplies no bfloat16
CASE = Case(name="some", T=2, E=3, K=2, D=128, I=128)
QUICK = (("int8:row", "int8:row"),)
FLOATS = ("", "")
# Of many rows an expert, on Hopper; where none has kernels for a format, of few.
ARITHMETIC = {
    FLOATS: "16 bits, columns in order",
    ("int4:1x128:bfloat16", ""): "16 bits, columns in the order of words",
    ("mxfp4", "mxfp8"): "16 bits, columns in the order of words",
    ("mxfp6_e3m2", "float8_e4m3fn:row"): "16 bits, columns in the order of words",
    ("float8_e4m3fn:row", ""): "16 bits, columns in the order of words",
    ("mxfp8", "mxfp8"): "16 bits, columns in the order of words",
    ("int8:row", "int8:row"): "int32",
    ("float8_e4m3fn:row", "float8_e4m3fn:row"): "float8 in one sum",
    ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"): "float8, a sum for 128 columns",
    ("q4_k", ""): "16 bits, columns in order",
    ("mxfp8_e5m2", ""): "16 bits, columns in order",
}


@pytest.mark.parametrize("formats", those_of(QUICK, PAIRS), ids=str)
def test_rows_in_any_batch(formats: tuple[str, str]) -> None:
    call = call_of(*formats, DTYPE, CASE, DEVICE)
    with invariant():
        want = run_experts("rows", call)
        for name, batch, at_T in batches(call, len(OTHERS) * (1 if formats in QUICK else 2), 6):
            got = run_experts("rows", batch)[at_T.to(DEVICE)]
            assert torch.equal(bits(got), bits(want)), name


@pytest.mark.parametrize("K", [1, 3, 5])
def test_one_token_of_floats_in_two_launches(K: int) -> None:
    """As a row of several, where products are exact, so that no order of sums matters."""
    case = Case(name="whole", T=2, E=6, K=K, D=48, I=32)
    layer = make_layer(case, F16, DEVICE)
    x_TD = torch.randint(-2, 3, (2, 48), device=DEVICE).to(F16)
    x_TD[:, 3:] = 0
    layer.ids_TK[1, 0] = -1
    biases = {
        "b13_EF": layer.w13_EFD[:, :, 0].contiguous(),
        "b2_ED": layer.w2_EDI[:, :, 0].contiguous(),
    }
    call = ExpertsCall(
        x_TD,
        layer.weights_TK,
        layer.ids_TK,
        layer.w13_EFD.round(decimals=1),
        layer.w2_EDI,
        **biases,
    )
    with invariant():
        want = run_experts("rows", call)
        for t in range(2):
            parts = {n: getattr(call, n)[t, None] for n in ("x_TD", "weights_TK", "ids_TK")}
            assert torch.equal(
                bits(run_experts("tiny", replace(call, **parts))), bits(want[t, None])
            )


OF_8_BITS = [f for f in PAIRS if f in {tuple(pair) for pair in offline_invariant.OF_8_BITS}]


@pytest.mark.parametrize("formats", OF_8_BITS, ids=str)
@pytest.mark.parametrize("K", [1, 3])
def test_one_token_of_codes_of_8_bits_is_not_sorted(formats: tuple[str, str], K: int) -> None:
    """As a row of several: by the same tiles, in the same steps."""
    call = call_of(*formats, DTYPE, replace(CASE, K=K), DEVICE)
    call.ids_TK[1, 0] = -1
    with invariant():
        want = run_experts("rows", call)
        for t in range(2):
            parts = {n: getattr(call, n)[t, None] for n in ("x_TD", "weights_TK", "ids_TK")}
            got = run_experts("tiny", replace(call, **parts))
            assert torch.equal(bits(got), bits(want[t, None]))


def on_hopper(T: int, formats: tuple[str, str]) -> ExpertsCall:
    case = LAYERS["qwen3_30b"]
    return layer_call(case, T, False) if formats == FLOATS else quantized_call(case, T, *formats)


@pytest.fixture
def hopper() -> Any:
    with (
        patch.object(triton_hopper, "refuse_hopper", lambda t: None),
        patch.object(triton_tiles, "processors", lambda t: 132),
        patch.object(triton_streams, "processors", lambda t: 132),
        patch.object(triton_tiles, "shared_memory", lambda t: 232448),
        invariant(),
    ):
        yield


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("formats", ARITHMETIC, ids=str)
def test_one_arithmetic_for_any_number_of_rows(formats: tuple[str, str]) -> None:
    """Whichever backend and path run a call, they compute rows as the layer's are."""
    for T in (1, 8, 64, 300, 4096):
        call = on_hopper(T, formats)
        assert triton_paths.arithmetic_of(call) == ARITHMETIC[formats]
        for kernel in ("tiny", "rows", "grouped")[T > 1 :]:
            if not isinstance(triton_paths.arithmetic_of_backend(kernel, call), Refused):
                path = triton_paths.pick(kernel, call).path
                assert path.computes(call) == ARITHMETIC[formats]


@pytest.mark.usefixtures("hopper")
def test_few_tokens_are_one_where_they_are_streamed() -> None:
    """Others of as many would be sums of all experts."""
    for T, formats, streamed in ((1, ("mxfp4", ""), True), (2, ("mxfp4", ""), False)):
        call = on_hopper(T, formats)
        assert (experts.backends["triton.tiny"].refusal("cuda", T, call) is None) == streamed
    call = on_hopper(1, ("int8:row", "int8:row"))
    assert triton_paths.pick("tiny", call).path.name == "tiny"
    biases = {"b2_ED": torch.empty(call.w2_EDI.shape[:2], dtype=BF16, device="meta")}
    refused = triton_paths.arithmetic_of_backend("tiny", replace(call, **biases))
    assert isinstance(refused, Refused)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("formats", [f for f in ARITHMETIC if f[0] and "8" not in f[1]], ids=str)
def test_tiles_multiply_scales_into_values(formats: tuple[str, str]) -> None:
    """A tile of few tokens would multiply scales into sums."""
    for T in (1, 8, 64, 300):
        call = on_hopper(T, formats)
        for path in triton_paths.paths_by(ARITHMETIC[formats], "rows", call):
            named = dict(zip(TENSORS, tensors_of(call), strict=True))
            layer = layer_of(named, False, call.activation, formats_named(call))
            tiles = path.tiles_of(invariant=True)(call.x_TD, call.ids_TK, layer, None)
            for tile in (tiles.up, tiles.down):
                if path.name == "rows/stream":
                    assert tile.in_values and tile.S == tile.C == 1
                elif triton_tiles.codes_of(layer).one_a_step:
                    assert tile.BN >= 64


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("given", [(), ("x_scale",), ("h_scale",), ("x_scale", "h_scale")], ids=str)
def test_one_scale_of_all_tokens_has_to_be_static(given: tuple[str, ...]) -> None:
    call = on_hopper(4, ("int8:row", "int8:row"))
    call = replace(call, x_format="int8:tensor", **{n: torch.ones(1, device="meta") for n in given})
    assert isinstance(triton_paths.arithmetic_of(call), Refused) == (len(given) < 2)


@pytest.mark.usefixtures("hopper")
def test_biases_behind_scales_have_one_path() -> None:
    """The compiler may round a sum and its bias once in one kernel, and twice in another."""
    call = on_hopper(4, ("int8:row", "int8:row"))
    assert not isinstance(triton_paths.arithmetic_of_backend("rows", call), Refused)
    call = replace(call, b13_EF=torch.empty(call.w13_EFD.shape[:2], device="meta"))
    assert isinstance(triton_paths.arithmetic_of_backend("rows", call), Refused)
    assert triton_paths.arithmetic_of_backend("grouped", call) == "int32"


def test_where_tokens_lie_does_not_matter() -> None:
    """What they are copied to is where kernels that need them aligned take them."""
    x_TD = torch.randn(6, 33)[:, 1:]
    placed_TD = triton_arithmetic.placed(x_TD)
    assert triton_arithmetic.lies(placed_TD) and torch.equal(placed_TD, x_TD)
    assert triton_arithmetic.placed(placed_TD) is placed_TD
    call = replace(make_call(), x_TD=x_TD)
    assert triton_arithmetic.lies(triton_arithmetic.in_place(call).x_TD)


def make_call() -> ExpertsCall:
    layer = make_layer(replace(CASE, D=32), F16)
    return ExpertsCall(layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
