"""Weights of nvfp4, mxfp6 and float8_e5m2, and inputs that are emulated, on a CUDA GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops import activate, expert_gemm, experts, quantize
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import ACTIVATIONS, TOL, Case, assert_close, make_layer

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.experts import driver
from tests.gpu.captures import captured
from tests.gpu.test_quantized_kernels import TOKENS, WIDTHS, hopper, relative_error, uneven
from tests.kernels.codes import quantized
from tests.kernels.test_emulated import EXACT, PAIRS, ROUNDED, emulated
from tests.kernels.test_emulated import quantized as rounded

pytestmark = pytest.mark.gpu

WEIGHTS = ("nvfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e5m2")
EVERY = [(f, "") for f in WEIGHTS] + list(PAIRS)
DTYPES = (torch.bfloat16, torch.float16)
MANY = (200, 1000, 3000)
# Relative errors, at most: halves are rounded three times. Of inputs that are quantised, too, sums
# in another order move some h past a tie of codes (of 8 bits with a scale for all, 2.01e-2 was
# measured on an H100); few steps of four bits are a lot.
MOST_ERROR = {"": 1e-2, "8": 2.5e-2, "4": 5e-2}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_name = pytest.mark.parametrize("name", WIDTHS)


def layer_of(
    name: str | Case, T: int, formats: tuple[str, str], dtype: torch.dtype, **more: Any
) -> ExpertsCall:
    """A call of T tokens of a case, or of that of WIDTHS with this name."""
    case = replace(WIDTHS[name] if isinstance(name, str) else name, T=T)
    layer = make_layer(case, dtype, "cuda", gated=more.get("gated", True))
    weights = quantized(layer.w13_EFD, layer.w2_EDI, formats[0])
    given = (layer.x_TD, layer.weights_TK, layer.ids_TK, weights.pop("w13"), weights.pop("w2"))
    call = experts.call(
        *given, layer.b13_EF, layer.b2_ED, **weights, x_format=formats[1], **more
    )  # fmt: skip
    experts.check(call)
    return call


def wanted(call: ExpertsCall) -> Tensor:
    """The layer in float32 of decoded weights, and of inputs that are quantised if they are."""
    c, format = call, Format.of(call.w_format)
    T, K, E = *c.ids_TK.shape, c.w13_EFD.shape[0]
    x_TD = rounded(c.x_TD, c.x_format, c.x_scale) if c.x_format else c.x_TD.float()
    assert c.b13_EF is not None and c.b2_ED is not None
    h_TKI, y_TKD = None, torch.zeros(T, K, c.x_TD.shape[1], device="cuda")

    def product(x: Tensor, e: int, w: Tensor, scale: Any, beside: Any, bias: Tensor) -> Tensor:
        common, zero = (None if t is None else t[e] for t in beside)
        matrix = packing.dequantize(w[e], scale[e], format, zero, common)
        return F.linear(x, matrix, bias[e].float())

    beside13 = c.global_scale13_E, c.w13_zero_EFG
    beside2 = c.global_scale2_E, c.w2_zero_EDG
    pairs = [(c.ids_TK == e).nonzero(as_tuple=True) for e in range(E)]
    for e, (t, k) in enumerate(pairs):
        y = product(x_TD[t], e, c.w13_EFD, c.w13_scale_EFG, beside13, c.b13_EF)
        h = activate.reference(y, *c.activation)
        if h_TKI is None:
            h_TKI = torch.zeros(T, K, h.shape[1], device="cuda")
        h_TKI[t, k] = h
    assert h_TKI is not None
    if c.x_format:
        h_RI = h_TKI.to(c.x_TD.dtype).flatten(0, 1)
        h_TKI = rounded(h_RI, c.x_format, c.h_scale).view(h_TKI.shape)
    for e, (t, k) in enumerate(pairs):
        y_TKD[t, k] = product(
            h_TKI[t, k], e, c.w2_EDI, c.w2_scale_EDG, beside2, c.b2_ED
        )  # fmt: skip
    used_TK = (c.ids_TK >= 0) & (c.ids_TK < E)
    return (y_TKD * c.weights_TK[..., None]).masked_fill(~used_TK[..., None], 0).sum(1)


def check(kernel: str, call: ExpertsCall) -> Tensor:
    backend = experts.backends[kernel]
    assert backend.refusal("cuda", len(call.x_TD), call) is None
    got: Tensor = backend.run(call)
    bits = "" if not call.x_format else "8" if Format.of(call.x_format).bits == 8 else "4"
    assert relative_error(got, wanted(call)) <= MOST_ERROR[bits], len(call.x_TD)
    assert torch.equal(backend.run(call), got), "other bits"
    return got


@each_dtype
@pytest.mark.parametrize("w_format", WEIGHTS)
@pytest.mark.parametrize("kernel", TOKENS)
@each_name
def test_every_size(name: str, kernel: str, w_format: str, dtype: torch.dtype) -> None:
    for T in TOKENS[kernel]:
        if T * WIDTHS[name].K <= 64 or kernel != "triton.tiny":
            check(kernel, layer_of(name, T, (w_format, ""), dtype))


@each_dtype
@pytest.mark.parametrize("w_format", WEIGHTS)
@each_name
def test_many_rows_an_expert(name: str, w_format: str, dtype: torch.dtype) -> None:
    for T in (5, *MANY):
        call = layer_of(name, T, (w_format, ""), dtype)
        check("triton.grouped", call)
    assert not bool(check("triton.grouped", uneven(call))[3].any())


@pytest.mark.parametrize("kernel", ["triton.rows", "triton.grouped"])
@pytest.mark.parametrize("w_format", ["mxfp4", "int4:1x128:bfloat16"])
def test_static_scales_of_emulated_inputs(w_format: str, kernel: str) -> None:
    """By the second of which h saturates."""
    static = {
        n: torch.tensor([s], device="cuda") for n, s in (("x_scale", 0.011), ("h_scale", 2e-3))
    }
    for T in (1, 40, 700):
        call = layer_of("qwen3_30b", T, (w_format, "float8_e4m3fn:tensor"), torch.bfloat16)
        check(kernel, replace(call, **static))


@hopper
@pytest.mark.parametrize("name", ["qwen3_30b", "gpt_oss_20b", "dsv3", "odd"])
def test_many_rows_of_nvfp4_are_not_decoded_first(name: str) -> None:
    with patch.object(driver, "decoded", None):
        check("triton.grouped", layer_of(name, 500, ("nvfp4", ""), torch.bfloat16))


@pytest.mark.parametrize("kernel", [*TOKENS, "triton.grouped"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("w_format", ["nvfp4", "mxfp6_e2m3"])
def test_every_activation(w_format: str, activation: str, kernel: str) -> None:
    for T in (1, 40) if kernel != "triton.tiny" else (1, 4):
        args = ACTIVATIONS[activation]
        check(kernel, layer_of("qwen3_30b", T, (w_format, ""), torch.bfloat16, **args))


@pytest.mark.parametrize("w_format", ["nvfp4"])
@pytest.mark.parametrize("kernel", [*TOKENS, "triton.grouped"])
def test_a_scale_that_is_no_number_comes_through(kernel: str, w_format: str) -> None:
    call = layer_of("qwen3_30b", 4, (w_format, ""), torch.bfloat16)
    assert call.w2_scale_EDG is not None
    call.w2_scale_EDG.view(torch.uint8)[:, 3, 1] = 0x7F
    got = experts.backends[kernel].run(call)
    assert bool(got[:, 3].isnan().all())
    assert not bool(got[:, :3].isnan().any()) and not bool(got[:, 4:].isnan().any())


@each_dtype
@pytest.mark.parametrize("x_format", [*EXACT, *ROUNDED])
def test_values_are_those_of_codes(x_format: str, dtype: torch.dtype) -> None:
    sizes = torch.logspace(-4, 3, 300, device="cuda")
    x_TD = (torch.randn(300, 2048, device="cuda") * sizes[:, None]).to(dtype)
    got, want = emulated(x_TD, x_format), rounded(x_TD, x_format).to(dtype)
    assert torch.equal(got, want)


@each_dtype
@pytest.mark.parametrize("kernel", ["triton.rows", "triton.grouped"])
@pytest.mark.parametrize("formats", PAIRS, ids=str)
@each_name
def test_emulated_inputs(
    name: str, formats: tuple[str, str], kernel: str, dtype: torch.dtype
) -> None:
    for T in (1, 20, 300):
        check(kernel, layer_of(name, T, formats, dtype))
    check(kernel, uneven(layer_of(name, 200, formats, dtype)))


@pytest.mark.parametrize("formats", EVERY, ids=str)
@pytest.mark.parametrize("T", [2, 40, 1000])
@pytest.mark.usefixtures("overlapping")
def test_a_captured_call_follows_its_routing(T: int, formats: tuple[str, str]) -> None:
    call = layer_of("qwen3_30b", T, formats, torch.bfloat16)
    args = experts.arguments.flat(call)
    with torch.inference_mode():
        experts(*args)
        graph, out = captured(lambda: experts(*args))
        call.ids_TK.copy_((call.ids_TK + 5) % 12)
        call.x_TD.normal_()
        graph.replay()
        assert torch.equal(out, experts(*args))


@pytest.mark.parametrize("formats", EVERY, ids=str)
def test_the_ops_pick_these_kernels(formats: tuple[str, str]) -> None:
    few = "triton.rows" if formats[1] else "triton.tiny"
    for T, kernel in ((1, few), (12, "triton.rows"), (4000, "triton.grouped")):
        assert experts.pick(layer_of("qwen3_30b", T, formats, torch.bfloat16)).name == kernel


@pytest.mark.parametrize("formats", [*EVERY, ("int8:row", "int8:row")], ids=str)
def test_one_product(formats: tuple[str, str]) -> None:
    w_format, x_format = formats
    call = layer_of("qwen3_30b", 60, (w_format, ""), torch.bfloat16)
    x_RD, scale = call.x_TD, None
    if x_format:
        x_RD, scale = quantize(x_RD, x_format)
    ends_E = torch.arange(5, 65, 5, dtype=torch.int32, device="cuda")
    product = expert_gemm.call(
        x_RD, call.w13_EFD[:, :96].contiguous(), ends_E, x_scale_RG=scale,
        w_scale_EFG=call.w13_scale_EFG[:, :96].contiguous(), global_scale_E=call.global_scale13_E,
        w_format=w_format, x_format=x_format, out_dtype="bfloat16" if x_format else "",
    )  # fmt: skip
    assert expert_gemm.pick(product).name == "triton"
    got, want = expert_gemm.backends["triton"].run(product), expert_gemm.body(product)
    assert_close(got, want, TOL["experts", torch.bfloat16], str(formats))
