"""Kernels of quantised weights on a CUDA GPU, at the widths of published layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moe_ops
from moe_ops import activate, experts
from moe_ops.backends.triton import run_experts
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import ACTIVATIONS, Case, make_layer

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.experts import driver
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu

# Widths of published layers, with few experts.
WIDTHS = {
    "qwen3_30b": Case(name="qwen3_30b", T=1, E=12, K=4, D=2048, I=768),
    "gpt_oss_20b": Case(name="gpt_oss_20b", T=1, E=6, K=4, D=2880, I=2880),
    "dsv3": Case(name="dsv3", T=1, E=4, K=2, D=7168, I=2048),
    "odd": Case(name="odd", T=1, E=5, K=3, D=704, I=352),
}
W8A8 = ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128")
FORMATS = (
    ("int4:1x32:bfloat16", ""), ("int4:1x64:bfloat16", ""), ("int4:1x128:bfloat16", ""),
    ("uint4:1x128:float16", ""), ("uint4:1x32", ""), ("int4:row", ""), ("mxfp4", ""),
    ("float8_e4m3fn:128x128", ""), W8A8,
    ("float8_e4m3fn:row", ""), ("mxfp8", ""), ("int8:row", ""), ("int8:1x128", ""),
    ("uint8:1x64:float16", ""),
)  # fmt: skip
# Relative errors of a layer, at most: halves are rounded three times; float8 inputs twice more.
MOST_ERROR = {"": 1e-2, "float8_e4m3fn:1x128": 4.6e-2}
# From float32 of inputs that are quantised, too. Sums in another order move some h past a tie of
# its dtype, and of these some past one of float8: 1.34e-2 and 6.1e-3 were measured on an H200. The
# definition, which also rounds what comes before the activation, is 1.6e-2 from it in bfloat16.
MOST_ERROR_OF_SUMS = {torch.bfloat16: 1.5e-2, torch.float16: 7e-3}
TOKENS = {"triton.tiny": (1, 4, 16), "triton.rows": (1, 16, 64, 200, 1000)}
MANY = (200, 1000, 3000)  # tokens of triton.grouped
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="triton.grouped multiplies quantised inputs on Hopper alone",
)


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


def wanted(call: ExpertsCall, *, quantized: bool = False) -> Tensor:
    """The layer in float32; if `quantised` of inputs that are quantised where kernels do it."""
    format, out = Format.of(call.w_format), torch.zeros(call.x_TD.shape, device="cuda")
    x_TD = as_quantized(call.x_TD, call) if quantized else call.x_TD.float()
    assert call.b13_EF is not None and call.b2_ED is not None
    assert call.w13_scale_EFG is not None and call.w2_scale_EDG is not None

    def decoded(w: Tensor, scale: Tensor, zero: Tensor | None, e: int) -> Tensor:
        return packing.dequantize(w[e], scale[e], format, None if zero is None else zero[e])

    for e in range(call.w13_EFD.shape[0]):
        rows, choices = (call.ids_TK == e).nonzero(as_tuple=True)
        w13 = decoded(call.w13_EFD, call.w13_scale_EFG, call.w13_zero_EFG, e)
        w2 = decoded(call.w2_EDI, call.w2_scale_EDG, call.w2_zero_EDG, e)
        y = F.linear(x_TD[rows], w13, call.b13_EF[e].float())
        h = activate.reference(y, *call.activation)
        if quantized:
            h = as_quantized(h.to(call.x_TD.dtype), call)
        y = F.linear(h, w2, call.b2_ED[e].float())
        out[rows] += y * call.weights_TK[rows, choices, None]
    return out


def as_quantized(x: Tensor, call: ExpertsCall) -> Tensor:
    format = Format.of(call.x_format)
    done = packing.quantize(x, format)
    return packing.dequantize(done.values, done.scale, format)


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


@pytest.mark.parametrize("w_format", [f for f, inputs in FORMATS if not inputs])
@pytest.mark.parametrize("name", WIDTHS)
def test_decoded_layers(name: str, w_format: str) -> None:
    """Of many rows an expert weights are decoded first."""
    if not fits(WIDTHS[name], w_format):
        pytest.skip("its groups do not divide these widths")
    for T in (3, 700):
        call, want = layer_of(replace(WIDTHS[name], T=T), w_format, "")
        assert relative_error(grouped(call), want) <= MOST_ERROR[""], T


@pytest.mark.parametrize("formats", [FORMATS[2], FORMATS[6], W8A8], ids=str)
@pytest.mark.parametrize("K", [4, 10])
def test_one_token_whose_experts_are_elsewhere(K: int, formats: tuple[str, str]) -> None:
    """Neither their weights matter nor what memory held in the place of their h."""
    call, _ = layer_of(replace(WIDTHS["qwen3_30b"], K=K), *formats)
    call.ids_TK[0, :3] = torch.tensor([-1, 12, 2**30])
    call.weights_TK[0, :3] = torch.tensor([float("nan"), float("inf"), 1.0])
    got = experts.backends["triton.tiny"].run(call)
    assert relative_error(got, wanted(call)) <= MOST_ERROR[formats[1]]


def grouped(call: ExpertsCall) -> Tensor:
    backend = experts.backends["triton.grouped"]
    assert backend.refusal("cuda", call.x_TD.shape[0], call) is None
    out: Tensor = backend.run(call)
    assert_same_bits(backend.run(call), out)
    return out


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.view(torch.int16), want.view(torch.int16)), "other bits"


def uneven(call: ExpertsCall) -> ExpertsCall:
    """Half of the pairs on one expert, one on another, none on a third; and some on nobody."""
    T, K = call.ids_TK.shape
    ids = torch.rand(T, call.w13_EFD.shape[0] - 2, device="cuda").topk(K).indices.int() + 2
    ids[::2] = ids[::2].where(ids[::2] != 2, -1)
    ids[::2, 0] = 2
    ids[1, 0], ids[3], ids[7, -1] = 1, -1, -1
    return replace(call, ids_TK=ids)


WIDE = {n: c for n, c in WIDTHS.items() if c.I % 64 == 0}
CUT = {
    "steps_cut": Case(name="steps_cut", T=1, E=12, K=4, D=1040, I=448),
    "fewest_steps": Case(name="fewest_steps", T=1, E=40, K=4, D=400, I=448),
}


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*WIDE, *CUT])
def test_many_rows_an_expert(name: str, dtype: torch.dtype) -> None:
    for T in MANY:
        case = replace((WIDE | CUT)[name], T=T)
        call, want = layer_of(case, *W8A8, dtype=dtype)
        assert relative_error(grouped(call), want) <= MOST_ERROR[W8A8[1]], T
        call = uneven(call)
        got = grouped(call)
        assert relative_error(got, wanted(call)) <= MOST_ERROR[W8A8[1]], T
        assert not bool(got[3].any())
        assert relative_error(got, wanted(call, quantized=True)) <= MOST_ERROR_OF_SUMS[dtype], T


def activated(name: str, T: int, w_format: str, x_format: str = "") -> ExpertsCall:
    """A call with an activation of ACTIVATIONS."""
    args = ACTIVATIONS[name]
    case = Case(name=name, T=T, E=3, K=2, D=512, I=448)
    layer = make_layer(case, torch.bfloat16, "cuda", gated=args.get("gated", True))
    done = [packing.quantize(w, Format.of(w_format)) for w in (layer.w13_EFD, layer.w2_EDI)]
    call = experts.call(
        layer.x_TD, layer.weights_TK, layer.ids_TK, done[0].values, done[1].values,
        layer.b13_EF, layer.b2_ED, w13_scale_EFG=done[0].scale, w2_scale_EDG=done[1].scale,
        w_format=w_format, x_format=x_format, **args,
    )  # fmt: skip
    experts.check(call)
    return call


@hopper
@pytest.mark.parametrize("w_format", [W8A8[0], "float8_e4m3fn:64x128", "float8_e4m3fn:256x128"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_many_rows(name: str, w_format: str) -> None:
    args = ACTIVATIONS[name]
    if args.get("interleaved") and w_format == "float8_e4m3fn:64x128":
        pytest.skip("a scale has to be that of 128 rows")
    call = activated(name, 150, w_format, W8A8[1])
    assert (
        relative_error(grouped(call), wanted(call, quantized=True))
        <= MOST_ERROR_OF_SUMS[torch.bfloat16]
    )


@hopper
def test_experts_elsewhere_and_a_residual() -> None:
    call, _ = layer_of(replace(WIDTHS["qwen3_30b"], T=500), *W8A8)
    expert_map = torch.arange(24, device="cuda", dtype=torch.int32).flip(0) - 6
    call = replace(call, ids_TK=(call.ids_TK * 7) % 24, expert_map=expert_map)
    here = replace(call, ids_TK=expert_map[call.ids_TK.long()], expert_map=None)
    got = grouped(call)
    assert torch.equal(got, grouped(here))
    assert relative_error(got, wanted(here)) <= MOST_ERROR[W8A8[1]]
    residual_TD = torch.randn_like(call.x_TD)
    assert torch.equal(run_experts("grouped", call, residual_TD), residual_TD + got)


@hopper
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_of_many_rows_that_is_no_number_comes_through(bad: float) -> None:
    call, _ = layer_of(replace(WIDTHS["qwen3_30b"], T=300, E=4), *W8A8)
    assert call.w2_scale_EDG is not None and call.w13_scale_EFG is not None
    want = grouped(call)
    call.w2_scale_EDG[1, 3, 2] = bad
    got = grouped(call)
    hit = torch.zeros_like(got, dtype=torch.bool)
    hit[(call.ids_TK == 1).any(1), 3 * 128 : 4 * 128] = True
    assert torch.equal(got.isnan(), hit)
    assert torch.equal(got[~hit], want[~hit])
    call.w13_scale_EFG[2, 7, 1] = bad  # of the up rows of 128 columns of h
    assert bool(grouped(call)[(call.ids_TK == 2).any(1)].isnan().all())


@hopper
def test_tokens_of_many_rows_that_are_no_numbers_stay_alone() -> None:
    call, _ = layer_of(replace(WIDTHS["qwen3_30b"], T=300), *W8A8)
    want = grouped(call)
    for bad in (float("nan"), float("inf")):
        call.x_TD[100, 3] = bad
        got = grouped(call)
        assert bool(got[100].isnan().all())
        assert torch.equal(got[:100], want[:100]) and torch.equal(got[101:], want[101:])


# Formats whose many rows Hopper multiplies as they are stored, and widths that it takes.
AS_STORED = [f for f, inputs in FORMATS if not inputs]
TAKEN = {n: c for n, c in WIDTHS.items() if min(c.D, c.I) > 256} | {
    "cut": Case(name="cut", T=1, E=12, K=4, D=1056, I=416),
    "fewest_steps": Case(name="fewest_steps", T=1, E=40, K=4, D=288, I=288),
}


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("w_format", AS_STORED)
@pytest.mark.parametrize("name", TAKEN)
def test_many_rows_as_stored(name: str, w_format: str, dtype: torch.dtype) -> None:
    if not fits(TAKEN[name], w_format):
        pytest.skip("its groups do not divide these widths")
    with patch.object(driver, "decoded", None):  # nothing is decoded first
        for T in (*MANY, 5):
            call, want = layer_of(replace(TAKEN[name], T=T), w_format, "", dtype=dtype)
            assert relative_error(grouped(call), want) <= MOST_ERROR[""], T
        call = uneven(layer_of(replace(TAKEN[name], T=MANY[1]), w_format, "", dtype=dtype)[0])
        got = grouped(call)
        assert relative_error(got, wanted(call)) <= MOST_ERROR[""]
        assert not bool(got[3].any())


@hopper
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 129, 192, 193, 256, 257, 320, 449])
@pytest.mark.parametrize("w_format", ["int4:1x64:bfloat16", "int8:1x64"])
def test_every_kind_of_tile_as_stored(w_format: str, rows: int) -> None:
    case = Case(name="tile", T=rows, E=1, K=1, D=512, I=448)
    call, want = layer_of(case, w_format, "")
    assert relative_error(grouped(call), want) <= MOST_ERROR[""]


@hopper
@pytest.mark.parametrize("w_format", ["int4:1x32:bfloat16", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_as_stored(name: str, w_format: str) -> None:
    call = activated(name, 450, w_format)
    assert relative_error(grouped(call), wanted(call)) <= MOST_ERROR[""]


@hopper
@pytest.mark.parametrize("w_format", ["int4:1x128:bfloat16", "float8_e4m3fn:128x128"])
def test_tokens_as_stored_that_are_no_numbers_stay_alone(w_format: str) -> None:
    call, _ = layer_of(replace(WIDTHS["qwen3_30b"], T=300), w_format, "")
    want = grouped(call)
    for bad in (float("nan"), float("inf")):
        call.x_TD[100, 3] = bad
        got = grouped(call)
        assert bool(got[100].isnan().all())
        assert torch.equal(got[:100], want[:100]) and torch.equal(got[101:], want[101:])


@pytest.mark.parametrize("formats", FORMATS[:2] + FORMATS[6:9])
@pytest.mark.parametrize("kernel", TOKENS)
def test_float16(kernel: str, formats: tuple[str, str]) -> None:
    call, want = layer_of(replace(WIDTHS["odd"], T=4), *formats, dtype=torch.float16)
    if fits(WIDTHS["odd"], formats[0]):
        got = experts.backends[kernel].run(call)
        assert relative_error(got, want) <= MOST_ERROR[formats[1]]


@pytest.mark.parametrize("formats", [FORMATS[2], FORMATS[6], FORMATS[8]], ids=str)
@pytest.mark.parametrize("T", [2, 40, 1000])
@pytest.mark.usefixtures("overlapping")
def test_a_captured_call_follows_its_routing(T: int, formats: tuple[str, str]) -> None:
    call, want = layer_of(replace(WIDTHS["qwen3_30b"], T=T), *formats)
    args = experts.arguments.flat(call)
    with torch.inference_mode():
        moe_ops.experts(*args)
        graph, out = captured(lambda: moe_ops.experts(*args))
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
    for T, kernel in ((1, "triton.tiny"), (12, "triton.rows"), (4000, "triton.grouped")):
        call, _ = layer_of(replace(case, T=T), *formats)
        assert experts.pick(call).name == kernel


@hopper
def test_many_rows_of_float8_are_grouped() -> None:
    call, _ = layer_of(replace(WIDTHS["qwen3_30b"], T=2000), *W8A8)
    assert experts.pick(call).name == "triton.grouped"


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


@pytest.mark.parametrize("kernel", [*TOKENS, pytest.param("triton.grouped", marks=hopper)])
@pytest.mark.parametrize("formats", [("mxfp4", ""), FORMATS[8]], ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_weights_past_32_bits(T: int, kernel: str, formats: tuple[str, str]) -> None:
    """The last of so many experts that codes, words of them or decoded values are counted past
    2^31."""
    words = formats[0] == "mxfp4" and kernel != "triton.grouped"
    E = 130 if words else 34
    case = Case(name="large", T=T, E=2, K=2, D=8192, I=8192)
    call, want = layer_of(case, *formats)

    def far(t: Tensor | None) -> Tensor | None:
        if t is None or t.shape[0] != 2:
            return t
        large = torch.zeros((E, *t.shape[1:]), dtype=t.dtype, device="cuda")
        large[-2:] = t
        return large

    held = ("w13_EFD", "w2_EDI", "b13_EF", "b2_ED", "w13_scale_EFG", "w2_scale_EDG")
    call = replace(call, ids_TK=call.ids_TK + (E - 2), **{n: far(getattr(call, n)) for n in held})
    assert E * 16384 * 8192 // (8 if words else 1) > 2**31
    got = experts.backends[kernel].run(call)
    assert relative_error(got, want) <= MOST_ERROR[formats[1]]
