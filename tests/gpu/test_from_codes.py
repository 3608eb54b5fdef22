"""Experts that are given tokens as codes have the bits of those that quantise the tokens, by every
kernel of a CUDA GPU, eager and captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_ops import experts, quantize
from moe_ops.backends.triton import run_experts
from moe_ops.graphs.cuda_graph import capture_call
from moe_ops.ops.experts import ExpertsCall
from tests.gpu.test_quantized_kernels import CUT, WIDTHS, assert_same_bits, layer_of

pytest.importorskip("triton", reason="the kernels are Triton's")

pytestmark = pytest.mark.gpu

CASES = WIDTHS | CUT
# Formats of weights and of inputs.
LAYERS = {
    "float8 rows": ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    "int8 rows": ("int8:row", "int8:row"),
    "float8 groups": ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4 of mxfp8": ("mxfp4", "mxfp8"),
    "mxfp4 of float8 rows": ("mxfp4", "float8_e4m3fn:row"),
}
TOKENS = {"tiny": (1, 4, 16), "rows": (1, 16, 64, 200, 1000), "grouped": (16, 200, 3000)}


def of_codes(call: ExpertsCall) -> ExpertsCall:
    q_TD, scale_TG = quantize(call.x_TD, call.x_format)
    name = str(call.x_TD.dtype).removeprefix("torch.")
    given = replace(call, x_TD=q_TD, x_scale_TG=scale_TG, out_dtype=name)
    experts.check(given)
    return given


def refusals(kernel: str, call: ExpertsCall) -> list[str | None]:
    backend, T = experts.backends[f"triton.{kernel}"], call.x_TD.shape[0]
    return [backend.refusal("cuda", T, c) for c in (call, of_codes(call))]


def call_of(layer: str, case: str, T: int, dtype: torch.dtype = torch.bfloat16) -> ExpertsCall:
    call, _ = layer_of(replace(CASES[case], T=T), *LAYERS[layer], dtype=dtype)
    call.ids_TK[-1, 0] = -1
    return call


# Groups of MX formats are whole.
GRID = [
    (layer, case)
    for layer in LAYERS
    for case in ("qwen3_30b", "odd", "steps_cut")
    if case != "steps_cut" or "mx" not in layer
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", TOKENS)
@pytest.mark.parametrize(("layer", "case"), GRID)
def test_a_layer(layer: str, case: str, kernel: str, dtype: torch.dtype) -> None:
    ran, refused = 0, None
    for T in TOKENS[kernel]:
        call = call_of(layer, case, T, dtype)
        refused, of_given = refusals(kernel, call)
        assert refused == of_given
        if refused is not None:
            continue
        got, want = (run_experts(kernel, c) for c in (of_codes(call), call))
        assert got.dtype is dtype
        assert_same_bits(got, want)
        ran += 1
    if not ran:
        pytest.skip(f"triton.{kernel} refuses: {refused}")


@pytest.mark.parametrize("T", [1, 8, 3000])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_captured_layer(layer: str, T: int) -> None:
    """By the backend that is picked, replayed with other tokens and experts."""
    call = call_of(layer, "qwen3_30b", T)
    graphs = []
    for quantized in (False, True):

        def run(quantized: bool = quantized) -> Tensor:
            return experts.part(of_codes(call) if quantized else call)

        graphs.append(capture_call(run))
    for step in range(20):
        call.x_TD.normal_()
        call.x_TD.mul_(2.0 ** (step % 5 - 2))
        call.ids_TK.random_(call.w13_EFD.shape[0])
        for graph in graphs:
            graph.replay()
        assert_same_bits(graphs[1].output, graphs[0].output)
