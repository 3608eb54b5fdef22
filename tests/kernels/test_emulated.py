"""Inputs in formats that GPUs do not multiply, by kernels of 16 bits; in Triton's interpreter
without a GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe_ops import OPS, experts
from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_device import HOPPER
from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_inputs import inputs_of
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import ACTIVATIONS, BF16, DEVICE, F16, TOL, assert_close, make_layer

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.experts.operands.fake_quantized import emulate
from moe_ops.kernels.triton.experts.operands.permuted import arrange
from tests.chosen import in_turn, one_in, those_of
from tests.kernels.test_quantized_experts import ODD, call_of

F8 = torch.float8_e4m3fn
EXACT = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "mxfp8_e5m2", "float8_e4m3fn:1x64:e8m0")
ROUNDED = (
    "nvfp4", "float8_e4m3fn:row", "float8_e4m3fn:tensor", "int8:row", "float6_e3m2:row",
    "float8_e4m3fn:1x64",
)  # fmt: skip
# The interpreter does not round what it converts to bfloat16.
GRID = [(f, d) for f in (*EXACT, *ROUNDED) for d in (F16, BF16) if d is F16 or f in EXACT]
SMALLER = replace(ODD, T=3, D=64, I=32)
PAIRS = (
    ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp6_e3m2", "mxfp8"), ("mxfp8", "mxfp6_e2m3"),
    ("mxfp4", "float8_e4m3fn:row"), ("mxfp6_e2m3", "float8_e4m3fn:tensor"),
    ("int4:1x32", "float8_e4m3fn:1x32"),
)  # fmt: skip
each_pair = pytest.mark.parametrize("formats", those_of(PAIRS[:1] + PAIRS[4:5], PAIRS), ids=str)
each_kernel = pytest.mark.parametrize("kernel", ["rows", "grouped"])


def tokens(dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, up to the largest float16 and down to the smallest; zeros."""
    sizes = torch.tensor([1.0, 0.0, 1e-4, 3e-6, 40.0, 3e3, 1e4], device=DEVICE)
    x_TD = (torch.randn(7, 192, device=DEVICE) * sizes[:, None]).to(dtype)
    x_TD[0, :64] = 0
    x_TD[4, 5:40] = torch.linspace(-3, 3, 35, device=DEVICE)
    x_TD[6, 7] = 65504.0
    return x_TD


def quantized(x_TD: Tensor, x_format: str, static: Tensor | None = None) -> Tensor:
    """What codes of `quantize` stand for, by a global scale for each row; a static one belongs to
    the weights."""
    format, scale = Format.of(x_format), static
    if format.has_global_scale and static is None:
        own_T, rows = packing.global_scale_of(x_TD, format, by_row=True), x_TD[:, None]
        done = packing.quantize(rows, format, global_scale=own_T)
        return packing.dequantize(done.values, done.scale, format, global_scale=own_T)[:, 0]
    if format.has_global_scale:
        done = packing.quantize(x_TD, format, global_scale=static)
        return packing.dequantize(done.values, done.scale, format)
    done = packing.quantize(x_TD, format, scale=scale)
    return packing.dequantize(done.values, done.scale, format)


def emulated(x_TD: Tensor, x_format: str, static: Tensor | None = None) -> Tensor:
    # Float32 scales of groups go with integers alone.
    inputs = inputs_of("int4:1x64" if x_format == "float8_e4m3fn:1x64" else "mxfp4", x_format)
    assert inputs is not None
    return emulate(x_TD, x_TD.shape[1], inputs, static)


def assert_same(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize(("x_format", "dtype"), GRID, ids=str)
def test_values_are_those_of_codes(x_format: str, dtype: torch.dtype) -> None:
    x_TD = tokens(dtype)
    want = quantized(x_TD, x_format)
    got = emulated(x_TD, x_format)
    assert_same(got, want.to(dtype))
    assert bool(got.isfinite().all())
    if x_format in EXACT:
        assert torch.equal(got.float(), want)
    for bad in (float("nan"), float("inf")):
        x_TD[5, 100] = bad
        assert_same(emulated(x_TD, x_format), quantized(x_TD, x_format).to(dtype))


def test_a_global_scale_of_a_row_is_multiplied_last() -> None:
    """As codes are decoded: times the product of both scales 21 of these values are other ones."""
    sizes, g = torch.logspace(-2, 3, 24), torch.Generator().manual_seed(3)
    x_TD = (torch.randn(24, 512, generator=g) * sizes[:, None]).to(DEVICE, F16)
    assert_same(emulated(x_TD, "nvfp4"), quantized(x_TD, "nvfp4").to(F16))


@pytest.mark.parametrize("x_format", ["nvfp4", "float8_e4m3fn:tensor"])
@pytest.mark.parametrize("static", [0.0, 3e-3, 0.5])
def test_static_scales(x_format: str, static: float) -> None:
    x_TD, scale = tokens(F16), torch.tensor(static, device=DEVICE)
    x_TD[1, 3], x_TD[4, 7] = float("inf"), float("nan")
    want = quantized(x_TD, x_format, scale).to(F16)
    assert_same(emulated(x_TD, x_format, scale), want)
    assert bool(want.nan_to_num(0.0).any()) == (static > 0)


@pytest.mark.parametrize("x_format", ["mxfp4", "nvfp4", "float8_e4m3fn:row"])
@pytest.mark.parametrize("w_format", ["mxfp4", "mxfp8"])
def test_arranged_columns(w_format: str, x_format: str) -> None:
    x_TD, weight, inputs = (
        tokens(F16)[:, :96],
        weight_of(w_format, ""),
        inputs_of("mxfp4", x_format),
    )
    assert inputs is not None
    want = arrange(emulated(x_TD, x_format), weight)
    got = emulate(arrange(x_TD, weight), 96, inputs, None, arranged=weight.bits)
    assert_same(got, want)


def rounded_once(call: ExpertsCall) -> Tensor:
    """The definition in float32, but that h is rounded as kernels store it. To round the first
    product as well, as the definition does, moves h of near ties to other codes."""
    c, stage = call, {name: op.reference for name, op in OPS.items()}
    formats = {"x_format": c.x_format, "w_format": c.w_format, "out_dtype": "float32"}

    def coded(x_RD: Tensor, static: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        format, own_R = Format.of(c.x_format), None
        if format.has_global_scale and static is None:
            own_R = packing.global_scale_of(x_RD, format, by_row=True)
        return *stage["quantize"](x_RD, c.x_format, static if own_R is None else own_R), own_R

    E, K = c.w13_EFD.shape[0], c.ids_TK.shape[1]
    _, rows_R, ends_E = stage["dispatch"](c.x_TD, c.ids_TK, E, c.expert_map)
    q_TD, scale_TG, own_T = coded(c.x_TD, c.x_scale)
    token_R = rows_R.clamp(min=0).long() // K
    one = Format.of(c.x_format).group == TENSOR
    y_RF = stage["expert_gemm"](
        q_TD[token_R], c.w13_EFD, ends_E, c.b13_EF,
        x_scale_RG=scale_TG if one else scale_TG[token_R],
        x_global_scale_R=None if own_T is None else own_T[token_R],
        w_scale_EFG=c.w13_scale_EFG, global_scale_E=c.global_scale13_E, **formats,
    )  # fmt: skip
    h_RI = stage["activate"](y_RF, *c.activation).to(c.dtype)
    q_RI, scale_RG, own_R = coded(h_RI.masked_fill(rows_R[:, None] < 0, 0), c.h_scale)
    y_RD = stage["expert_gemm"](
        q_RI, c.w2_EDI, ends_E, c.b2_ED, x_scale_RG=scale_RG, w_scale_EFG=c.w2_scale_EDG,
        global_scale_E=c.global_scale2_E, **formats, x_global_scale_R=own_R,
    )  # fmt: skip
    return stage["combine"](y_RD, c.weights_TK, rows_R)


def check(kernel: str, call: ExpertsCall) -> None:
    refusal = experts.backends[f"triton.{kernel}"].refusal("cuda", len(call.x_TD), call)
    assert refusal is None
    few_bits = Format.of(call.x_format).bits < 8
    tol = TOL["experts", torch.uint8 if few_bits else F8]
    assert_close(run_experts(kernel, call), rounded_once(call), tol, kernel)


@in_turn(each_kernel, each_pair)
def test_layers(formats: tuple[str, str], kernel: str) -> None:
    check(kernel, call_of(ODD, *formats, biases=True))


@pytest.mark.parametrize(("formats", "kernel"), [(PAIRS[0], "rows"), (PAIRS[5], "grouped")])
def test_experts_elsewhere_do_not_count(formats: tuple[str, str], kernel: str) -> None:
    """Also not for the one scale of all inputs; what memory held in their place is NaN here."""
    call = call_of(SMALLER, *formats)
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=DEVICE)
    ids_TK = torch.tensor([[0, 2], [-1, 7], [1, 3]], device=DEVICE)
    call = replace(call, ids_TK=ids_TK, expert_map=expert_map)
    out, want = run_experts(kernel, call), experts.body(call)
    assert_close(out, want, TOL["experts", torch.uint8], kernel)
    assert not bool(out[1].any())


@one_in(
    2,
    pytest.mark.parametrize(
        ("kernel", "w_format"),
        [
            *(("rows", "mxfp6_e3m2"), ("grouped", "mxfp4")),
            pytest.param("rows", "mxfp4", marks=pytest.mark.every),
            pytest.param("grouped", "mxfp6_e3m2", marks=pytest.mark.every),
        ],
    ),
)
def test_a_residual_is_added_to_what_was_rounded(kernel: str, w_format: str) -> None:
    call = call_of(SMALLER, w_format, "mxfp4")
    residual_TD = torch.randn(call.x_TD.shape, device=DEVICE).to(F16)
    onto = run_experts(kernel, call, residual_TD)
    assert torch.equal(onto, residual_TD + run_experts(kernel, call))


@pytest.mark.every
@each_kernel
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(kernel: str, name: str) -> None:
    check(kernel, call_of(ODD, "mxfp4", "mxfp8", biases=True, **ACTIVATIONS[name]))


@each_kernel
def test_static_scales_of_a_layer(kernel: str) -> None:
    """Those of the weights contain them."""
    call = call_of(ODD, "nvfp4", "nvfp4", biases=True)
    assert call.global_scale13_E is not None and call.global_scale2_E is not None
    x_scale, h_scale = torch.tensor(2e-3, device=DEVICE), torch.tensor([5e-4], device=DEVICE)
    call = replace(
        call, x_scale=x_scale, h_scale=h_scale,
        global_scale13_E=call.global_scale13_E * x_scale,
        global_scale2_E=call.global_scale2_E * h_scale,
    )  # fmt: skip
    if kernel == "rows":
        check(kernel, call)
    else:
        refusal = experts.backends["triton.grouped"].refusal("cuda", 5, call)
        assert refusal == "has no room in float16 for weights times a static scale of inputs"


def test_static_scales_of_experts_become_one() -> None:
    """The largest of them, and factors in which it stands for their own."""
    call = call_of(SMALLER, "nvfp4", "nvfp4")
    assert call.global_scale13_E is not None and call.global_scale2_E is not None
    x_scale, h_scale = torch.tensor([2e-3], device=DEVICE), torch.tensor([5e-4], device=DEVICE)
    one = replace(
        call, x_scale=x_scale, h_scale=h_scale,
        global_scale13_E=call.global_scale13_E * x_scale,
        global_scale2_E=call.global_scale2_E * h_scale,
    )  # fmt: skip
    smaller_E = torch.exp2(-torch.arange(SMALLER.E, device=DEVICE).float())
    own = replace(
        one, x_scale=x_scale * smaller_E, h_scale=h_scale * smaller_E,
        global_scale13_E=one.global_scale13_E * smaller_E,
        global_scale2_E=one.global_scale2_E * smaller_E,
    )  # fmt: skip
    experts.check(own)
    assert experts.backends["triton.rows"].refusal("cuda", len(own.x_TD), own) is None
    assert torch.equal(run_experts("rows", own), run_experts("rows", one))


def test_a_token_that_is_no_number_stays_alone() -> None:
    call = call_of(SMALLER, *PAIRS[4])
    want = run_experts("rows", call)
    call.x_TD[1, 3] = float("inf")
    got = run_experts("rows", call)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[::2], want[::2])


@each_kernel
def test_no_tokens(kernel: str) -> None:
    call = call_of(replace(ODD, T=0), "nvfp4", "nvfp4")
    assert run_experts(kernel, call).shape == (0, ODD.D)


def test_what_is_refused() -> None:
    call = call_of(ODD, "mxfp4", "float8_e4m3fn:tensor")
    tiny, rows = (experts.backends[f"triton.{name}"] for name in ("tiny", "rows"))
    assert tiny.refusal("cuda", 5, call) == "emulates no inputs, as triton.rows does"
    one = torch.ones((), device=DEVICE)
    static = replace(call, x_scale=one)
    assert rows.refusal("cuda", 5, static) == (
        "has no room in float16 for codes times a static scale; use bfloat16"
    )
    static = replace(static, x_TD=call.x_TD.to(BF16))
    assert rows.refusal("cuda", 5, static) is None
    each = replace(static, h_scale=torch.ones(ODD.E, device=DEVICE))
    assert rows.refusal("cuda", 5, each) == (
        "quantises inputs by one static scale for all experts, got one for each"
    )
    assert inputs_of("mxfp4", "float8_e4m3fn:1x128") is None  # its float32 scales would be rounded


@pytest.mark.parametrize("kernel", ["tiny", "rows", "grouped"])
def test_global_scales_of_floats_are_refused(kernel: str) -> None:
    layer = make_layer(ODD, F16, DEVICE)
    given = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    call = experts.call(*given, global_scale2_E=torch.ones(ODD.E, device=DEVICE))
    refusal = experts.backends[f"triton.{kernel}"].refusal("cuda", 5, call)
    assert refusal == "has global scales for quantised weights alone"


def test_every_scheme_of_other_inputs_is_emulated() -> None:
    """But of 8 bits, whose codes are multiplied."""
    pairs = [pair for scheme in SCHEMES.values() for pair in scheme.pairs() if pair[1]]
    others = [(w, x) for w, x in pairs if not (w.startswith(("float8", "int8")))]
    assert len(others) == 36
    call = call_of(ODD, "mxfp4", "mxfp4")
    with patch("torch.cuda.get_device_capability", return_value=HOPPER):
        assert all(inputs_of(*pair) is not None for pair in others)
        assert experts.backends["triton.rows"].emulates(call)
        assert not experts.backends["triton.rows"].emulates(call_of(ODD, "mxfp4"))
