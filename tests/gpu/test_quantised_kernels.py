"""Kernels of quantised weights on a CUDA GPU, at the widths of published layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moe_ops
from moe_ops import experts
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, make_layer

pytestmark = pytest.mark.gpu

# Widths of published layers, with few experts.
WIDTHS = {
    "qwen3_30b": Case(name="qwen3_30b", T=1, E=12, K=4, D=2048, I=768),
    "gpt_oss_20b": Case(name="gpt_oss_20b", T=1, E=6, K=4, D=2880, I=2880),
    "dsv3": Case(name="dsv3", T=1, E=4, K=2, D=7168, I=2048),
    "odd": Case(name="odd", T=1, E=5, K=3, D=704, I=352),
}
FORMATS = (
    ("int4:1x32:bfloat16", ""), ("int4:1x64:bfloat16", ""), ("int4:1x128:bfloat16", ""),
    ("uint4:1x128:float16", ""), ("uint4:1x32", ""), ("int4:row", ""), ("mxfp4", ""),
    ("float8_e4m3fn:128x128", ""), ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    ("float8_e4m3fn:row", ""), ("mxfp8", ""),
)  # fmt: skip
# Relative errors of a layer, at most: halves are rounded three times; float8 inputs twice more.
MOST_ERROR = {"": 1e-2, "float8_e4m3fn:1x128": 4.6e-2}
TOKENS = {"triton.tiny": (1, 4, 16), "triton.rows": (1, 16, 64, 200, 1000)}


def fits(case: Case, w_format: str) -> bool:
    across = Format.of(w_format).group[1]
    return "float8" in w_format or across == -1 or case.D % across == case.I % across == 0


def layer_of(
    case: Case, w_format: str, x_format: str, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> tuple[ExpertsCall, Tensor]:
    """A call, and what it should give: float32 of decoded weights and unquantised inputs."""
    layer = make_layer(case, dtype, "cuda")
    done = [packing.quantize(w, Format.of(w_format)) for w in (layer.w13_EFD, layer.w2_EDI)]
    call = experts.call(
        layer.x_TD, layer.weights_TK, layer.ids_TK, done[0].values, done[1].values,
        layer.b13_EF, layer.b2_ED, w13_scale_EFG=done[0].scale, w2_scale_EDG=done[1].scale,
        w13_zero_EFG=done[0].zero, w2_zero_EDG=done[1].zero, w_format=w_format, x_format=x_format,
        **more,
    )  # fmt: skip
    experts.check(call)
    return call, wanted(call)


def wanted(call: ExpertsCall) -> Tensor:
    format, out = Format.of(call.w_format), torch.zeros(call.x_TD.shape, device="cuda")
    assert call.b13_EF is not None and call.b2_ED is not None
    assert call.w13_scale_EFG is not None and call.w2_scale_EDG is not None

    def decoded(w: Tensor, scale: Tensor, zero: Tensor | None, e: int) -> Tensor:
        return packing.dequantize(w[e], scale[e], format, None if zero is None else zero[e])

    for e in range(call.w13_EFD.shape[0]):
        rows, choices = (call.ids_TK == e).nonzero(as_tuple=True)
        w13 = decoded(call.w13_EFD, call.w13_scale_EFG, call.w13_zero_EFG, e)
        w2 = decoded(call.w2_EDI, call.w2_scale_EDG, call.w2_zero_EDG, e)
        gate_up = F.linear(call.x_TD[rows].float(), w13, call.b13_EF[e].float())
        gate, up = gate_up.chunk(2, -1)
        y = F.linear(F.silu(gate) * up, w2, call.b2_ED[e].float())
        out[rows] += y * call.weights_TK[rows, choices, None]
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


GRID = [
    (kernel, name, formats)
    for kernel in TOKENS for name, case in WIDTHS.items() for formats in FORMATS
    if fits(case, formats[0])
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "name", "formats"), GRID)
def test_every_size(kernel: str, name: str, formats: tuple[str, str]) -> None:
    for T in TOKENS[kernel]:
        call, want = layer_of(replace(WIDTHS[name], T=T), *formats)
        refusal = experts.backends[kernel].refusal("cuda", T, call)
        if refusal is not None and "takes at most" in refusal:
            continue
        assert refusal is None
        got = experts.backends[kernel].run(call)
        assert relative_error(got, want) <= MOST_ERROR[formats[1]], T
        assert torch.equal(experts.backends[kernel].run(call), got), f"{T}: other bits"


@pytest.mark.parametrize("formats", FORMATS[:2] + FORMATS[6:9])
@pytest.mark.parametrize("kernel", TOKENS)
def test_float16(kernel: str, formats: tuple[str, str]) -> None:
    call, want = layer_of(replace(WIDTHS["odd"], T=4), *formats, dtype=torch.float16)
    if fits(WIDTHS["odd"], formats[0]):
        got = experts.backends[kernel].run(call)
        assert relative_error(got, want) <= MOST_ERROR[formats[1]]


@pytest.mark.parametrize("formats", [FORMATS[2], FORMATS[6], FORMATS[8]], ids=str)
@pytest.mark.parametrize("T", [2, 40])
@pytest.mark.usefixtures("overlapping")
def test_a_captured_call_follows_its_routing(T: int, formats: tuple[str, str]) -> None:
    call, want = layer_of(replace(WIDTHS["qwen3_30b"], T=T), *formats)
    args = experts.arguments.flat(call)
    with torch.inference_mode():
        moe_ops.experts(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = moe_ops.experts(*args)
        graph.replay()
        assert relative_error(out, want) <= MOST_ERROR[formats[1]]
        call.ids_TK.copy_((call.ids_TK + 5) % 12)
        call.x_TD.normal_()
        graph.replay()
        assert torch.equal(out, moe_ops.experts(*args))
        assert relative_error(out, wanted(call)) <= MOST_ERROR[formats[1]]


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_the_ops_pick_these_kernels(formats: tuple[str, str]) -> None:
    case = replace(WIDTHS["qwen3_30b"], T=1)
    for T, kernel in ((1, "triton.tiny"), (100, "triton.rows")):
        call, _ = layer_of(replace(case, T=T), *formats)
        assert experts.pick(call).name == kernel


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("w_format", ["int4:1x32:bfloat16", "int4:1x128:bfloat16"])
@pytest.mark.parametrize("kernel", TOKENS)
def test_a_scale_that_is_no_number_comes_through(kernel: str, w_format: str, bad: float) -> None:
    call, _ = layer_of(replace(WIDTHS["qwen3_30b"], T=4, E=4), w_format, "")
    assert call.w13_scale_EFG is not None
    call.w13_scale_EFG[:, 3, 1] = bad
    want = experts.reference(*experts.arguments.flat(call))
    assert bool(want.isnan().all())
    assert bool(experts.backends[kernel].run(call).isnan().all())


@pytest.mark.parametrize("kernel", TOKENS)
@pytest.mark.parametrize("formats", [("mxfp4", ""), FORMATS[8]], ids=str)
def test_weights_past_32_bits(kernel: str, formats: tuple[str, str]) -> None:
    """The last of so many experts that codes, or words of them, are counted past 2^31."""
    E = 66 if formats[0] == "mxfp4" else 34
    case = Case(name="large", T=3, E=2, K=2, D=8192, I=8192)
    call, want = layer_of(case, *formats)

    def far(t: Tensor | None) -> Tensor | None:
        if t is None or t.shape[0] != 2:
            return t
        large = torch.zeros((E, *t.shape[1:]), dtype=t.dtype, device="cuda")
        large[-2:] = t
        return large

    held = ("w13_EFD", "w2_EDI", "b13_EF", "b2_ED", "w13_scale_EFG", "w2_scale_EDG")
    call = replace(call, ids_TK=call.ids_TK + (E - 2), **{n: far(getattr(call, n)) for n in held})
    assert call.w13_EFD.numel() > 2**31
    got = experts.backends[kernel].run(call)
    assert relative_error(got, want) <= MOST_ERROR[formats[1]]
