"""Quantised arguments of `expert_gemm`, `experts` and `moe`: what is refused, and one graph for
every token count.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from moe_ops import OPS, expert_gemm, experts, moe, quantize
from moe_ops.conformance.samples import quantized
from moe_ops.testing import Case, make_layer
from tests.chosen import one_in
from tests.ops.refused import Bad, assert_refused, wrong_dtype

CASE = Case(name="small", T=6, E=2, K=2, D=64, I=32)
LAYER = make_layer(CASE)
U8 = torch.uint8


def gemm_call(w_format: str, x_format: str = "") -> dict[str, Any]:
    x: dict[str, Any] = {"x_RD": torch.randn(6, 64)}
    if x_format:
        q, scale = quantize(x["x_RD"], x_format)
        x = {"x_RD": q, "x_scale_RG": scale, "x_format": x_format, "out_dtype": "float32"}
    weights = quantized(LAYER.w13_EFD, w_format, "w", "FD")
    return {**x, **weights, "ends_E": torch.tensor([2, 6], dtype=torch.int32), "w_format": w_format}


INT4, MX, FP8, FP4 = (
    gemm_call("uint4:1x32"),
    gemm_call("mxfp6_e3m2", "mxfp8"),
    gemm_call("float8_e4m3fn:row", "float8_e4m3fn:row"),
    gemm_call("nvfp4"),
)
PLAIN = {"x_RD": torch.ones(6, 64), "w_EFD": LAYER.w13_EFD, "ends_E": INT4["ends_E"]}
SCALE_OF_INT4 = "w_EFD's scale must be float32 [2, 64, 2]"
OTHERS = "give the codes of w_format={!r}, or name the format of these"
GEMM: dict[str, tuple[dict[str, Any], Bad]] = {
    "unknown_format": (INT4, Bad({"w_format": "int3:row"}, "has the unknown element 'int3'")),
    "weight_dtype": (
        INT4, wrong_dtype("w_EFD", (2, 64, 32), "int8", "uint8", OTHERS.format("uint4:1x32"))
    ),
    "weight_of_floats": (
        INT4, wrong_dtype("w_EFD", (2, 64, 64), "float32", "uint8", OTHERS.format("uint4:1x32"))
    ),
    "codes_without_format": (
        PLAIN,
        wrong_dtype("w_EFD", (2, 64, 32), "uint8", "float32", "of codes name the w_format"),
    ),
    "plain_weight_dtype": (PLAIN, wrong_dtype("w_EFD", (2, 64, 64), "bfloat16", "float32")),
    "weight_width": (
        INT4,
        Bad(
            {"w_EFD": torch.zeros(2, 64, 16, dtype=U8), "w_scale_EFG": torch.ones(2, 64, 1),
             "w_zero_EFG": torch.ones(2, 64, 1, dtype=U8)},
            "w_EFD must hold 64 values a row (the width of x_RD), got 32 in shape (2, 64, 16) of "
            "'uint4:1x32'",
        ),
    ),
    "weight_bytes": (
        MX,
        Bad(
            {"w_EFD": torch.zeros(2, 64, 47, dtype=U8)},
            "w_EFD must have a multiple of 3 bytes a row for 'mxfp6_e3m2', got shape (2, 64, 47)",
        ),
    ),
    "transposed": (
        INT4,
        Bad(
            {"transposed": True},
            "w_EFD is transposed; quantised weights want their rows to be outputs",
        ),
    ),
    "no_scale": (INT4, Bad({"w_scale_EFG": None}, "w_EFD's scale is missing: 'uint4:1x32' wants")),
    "scale_shape": (
        INT4,
        Bad(
            {"w_scale_EFG": torch.ones(2, 64, 1)},
            f"{SCALE_OF_INT4}, got shape (2, 64, 1); w_EFD holds 64 rows of 64 values, in groups "
            "of 'uint4:1x32'",
        ),
    ),
    "scale_dtype": (
        INT4,
        Bad(
            {"w_scale_EFG": torch.ones(2, 64, 2).half()},
            f"{SCALE_OF_INT4}, got torch.float16; convert it, or name the format "
            "uint4:1x32:float16",
            TypeError,
        ),
    ),
    "scale_of_another_type": (
        MX,
        Bad(
            {"w_scale_EFG": torch.ones(2, 64, 2, dtype=torch.float8_e8m0fnu)},
            "w_EFD's scale must be uint8 [2, 64, 2], got torch.float8_e8m0fnu; if it holds the "
            "same bytes, give .view(torch.uint8)",
            TypeError,
        ),
    ),
    "scale_device": (
        INT4,
        Bad(
            {"w_scale_EFG": torch.ones(2, 64, 2, device="meta")},
            "w_EFD's scale is on meta, but the first argument is on cpu; move one",
        ),
    ),
    "no_zero": (INT4, Bad({"w_zero_EFG": None}, "w_EFD's zero is missing: 'uint4:1x32'")),
    "zero_shape": (
        INT4,
        Bad(
            {"w_zero_EFG": torch.ones(2, 64, dtype=U8)},
            "w_EFD's zero must be uint8 [2, 64, 2], got shape (2, 64)",
        ),
    ),
    "zero_without_need": (
        MX,
        Bad(
            {"w_zero_EFG": torch.ones(2, 64, 2, dtype=U8)},
            "w_EFD's zero was given, but 'mxfp6_e3m2' has no zero points; leave it out",
        ),
    ),
    "global_scale_shape": (
        FP4,
        Bad({"global_scale_E": torch.ones(3)}, "global_scale_E must be float32 [2], got shape (3"),
    ),
    "global_scale_dtype": (
        FP4,
        Bad(
            {"global_scale_E": torch.ones(2).half()},
            "global_scale_E must be float32 [2], got torch.float16; convert it first",
            TypeError,
        ),
    ),
    "no_out_dtype": (
        FP8,
        Bad(
            {"out_dtype": ""},
            "out_dtype must be named (float32, bfloat16, float16) for an input of "
            "torch.float8_e4m3fn",
        ),
    ),
    "unknown_out_dtype": (FP8, Bad({"out_dtype": "float64"}, "out_dtype='float64' is unknown")),
    "input_scale_missing": (
        FP8,
        Bad({"x_scale_RG": None}, "x_scale_RG is missing: 'float8_e4m3fn:row' wants float"),
    ),
    "input_scale_shape": (
        FP8,
        Bad({"x_scale_RG": torch.ones(6)}, "x_scale_RG must be float32 [6, 1], got shape (6,)"),
    ),
    "input_dtype": (
        FP8,
        wrong_dtype(
            "x_RD", (6, 64), "float32", "float8_e4m3fn", "give the codes of 'float8_e4m3fn:row'"
        ),
    ),
    "input_in_blocks": (
        FP8,
        Bad({"x_format": "float8_e4m3fn:2x64"}, "shares scales between rows; inputs want a scale"),
    ),
    "plain_weight_scale": (
        PLAIN,
        Bad(
            {"w_scale_EFG": torch.ones(2, 64, 1)},
            "w_scale_EFG was given without w_format; name the format it belongs to",
        ),
    ),
    "plain_input_scale": (
        PLAIN,
        Bad(
            {"x_scale_RG": torch.ones(6, 1)},
            "x_scale_RG was given without x_format; name the format it belongs to",
        ),
    ),
    "plain_weight_quantised_input": (
        PLAIN,
        Bad(
            {"x_format": "int8:row", "x_RD": torch.ones(6, 64, dtype=torch.int8)},
            "x_format='int8:row' wants a quantised weight too: name its w_format",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "bad"), GEMM.values(), ids=GEMM)
def test_expert_gemm_refuses(call: dict[str, Any], bad: Bad) -> None:
    expert_gemm(**call)  # good as it is
    assert_refused(expert_gemm, call, bad)


def layer_call(w_format: str, x_format: str = "") -> dict[str, Any]:
    return {
        "x_TD": LAYER.x_TD,
        **quantized(LAYER.w13_EFD, w_format, "w13", "FD"),
        **quantized(LAYER.w2_EDI, w_format, "w2", "DI"),
        "w_format": w_format,
        "x_format": x_format,
    }


ROUTED: dict[str, dict[str, Any]] = {
    "experts": {"weights_TK": LAYER.weights_TK, "ids_TK": LAYER.ids_TK},
    "moe": {"logits_TE": LAYER.logits_TE, "top_k": 2},
}
LAYERS: dict[str, tuple[dict[str, Any], Bad]] = {
    "w13_width": (
        layer_call("mxfp4"),
        Bad(
            {"w13_EFD": torch.zeros(2, 64, 16, dtype=U8),
             "w13_scale_EFG": torch.zeros(2, 64, 1, dtype=U8)},
            "w13_EFD must have 32 (the width of x_TD packed as 'mxfp4') on axis 2",
        ),
    ),
    "w2_width": (
        layer_call("mxfp4"),
        Bad(
            {"w2_EDI": torch.zeros(2, 64, 32, dtype=U8),
             "w2_scale_EDG": torch.zeros(2, 64, 2, dtype=U8)},
            "w2_EDI must have 16 (the width after the activation packed as 'mxfp4') on axis 2",
        ),
    ),
    "w2_rest": (  # of a width that codes do not fill
        layer_call("mxfp4"),
        Bad(
            {"w13_EFD": torch.zeros(2, 66, 32, dtype=U8),
             "w13_scale_EFG": torch.zeros(2, 66, 2, dtype=U8)},
            "w_format='mxfp4' packs 2 values together; pad the width 33 to a multiple of 2",
        ),
    ),
    "w2_scale": (
        layer_call("mxfp4"),
        Bad({"w2_scale_EDG": None}, "w2_EDI's scale is missing: 'mxfp4' wants uint8 [2, 64, 1]"),
    ),
    "scale_without_format": (
        layer_call("mxfp4"),
        Bad(
            {"w_format": "", "w13_EFD": LAYER.w13_EFD, "w2_EDI": LAYER.w2_EDI},
            "w13_scale_EFG was given without w_format; name it",
        ),
    ),
    "codes_without_format": (
        {"x_TD": LAYER.x_TD, "w13_EFD": LAYER.w13_EFD, "w2_EDI": LAYER.w2_EDI},
        wrong_dtype("w2_EDI", (2, 64, 32), "uint8", "float32", "of codes name the w_format"),
    ),
    "static_scale_of_rows": (
        layer_call("int8:row", "int8:row"),
        Bad({"x_scale": torch.ones(1)}, "x_scale goes with one scale for the tensor or with nvfp4"),
    ),
    "static_scale_without_format": (
        layer_call("int8:row"),
        Bad({"h_scale": torch.ones(1)}, "h_scale goes with one scale for the tensor or with nvfp4"),
    ),
    "global_scale2": (
        layer_call("nvfp4", "nvfp4"),
        Bad({"global_scale2_E": torch.ones(1)}, "global_scale2_E must be float32 [2], got shape"),
    ),
    "input_format": (
        layer_call("uint4:1x32"),
        Bad({"x_format": "uint4:row"}, "x_format='uint4:row' has zero points; inputs are"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize(("call", "bad"), LAYERS.values(), ids=LAYERS)
def test_whole_layers_refuse(name: str, call: dict[str, Any], bad: Bad) -> None:
    """Also after a call that has no fault, and again: a check that failed is not remembered."""
    OPS[name](**call, **ROUTED[name])
    for _ in range(2):
        assert_refused(OPS[name], {**call, **ROUTED[name]}, bad)


DYNAMIC = [
    ("float8_e4m3fn:16x32", "float8_e4m3fn:1x32"),
    ("float8_e4m3fn:tensor", "float8_e4m3fn:tensor"),
    ("mxfp4", "mxfp6_e2m3"),
    ("nvfp4", "nvfp4"),
    ("uint4:1x32", ""),
]


@one_in(2, pytest.mark.parametrize(("w_format", "x_format"), DYNAMIC))
def test_one_graph_serves_every_token_count(w_format: str, x_format: str) -> None:
    call = layer_call(w_format, x_format)
    del call["x_TD"]
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def run(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        y_TD = experts(x_TD, weights_TK, ids_TK, **call)
        scale = quantize(y_TD, x_format or "int8:row")[1]
        return y_TD, scale

    for T in (5, 2, 9):
        layer = make_layer(Case(name="many", T=T, E=2, K=2, D=64, I=32))
        routed = layer.x_TD, layer.weights_TK, layer.ids_TK
        got, scale = run(*routed)
        want = experts(*routed, **call)
        torch.testing.assert_close(got, want)
        assert scale.shape == quantize(want, x_format or "int8:row")[1].shape
    assert counter.frame_count == 1


@pytest.mark.parametrize("rms", [1e-4, 1e-2, 1.0, 100.0])
def test_nvfp4_inputs_of_any_size_keep_their_precision(rms: float) -> None:
    call = layer_call("mxfp8", "nvfp4") | ROUTED["experts"]
    call["x_TD"] = call["x_TD"] * rms
    exact = experts(**{**call, "x_format": ""})
    error = experts(**call) - exact
    assert float(error.norm() / exact.norm()) < 0.25


@pytest.mark.parametrize("name", ["w_format", "x_format"])
def test_a_format_that_is_none_is_refused_by_the_argument(name: str) -> None:
    call = layer_call("mxfp4", "mxfp8") | ROUTED["experts"]
    with pytest.raises(ValueError, match=f"{name}: format 'fp3' is not element:group"):
        experts(**{**call, name: "fp3"})


def test_the_dtype_of_weights_is_refused_by_its_own_name() -> None:
    call = layer_call("mxfp4") | ROUTED["moe"]
    with pytest.raises(ValueError, match="weights_dtype='int8' is unknown; choose one of float32"):
        moe(**call, weights_dtype="int8")
