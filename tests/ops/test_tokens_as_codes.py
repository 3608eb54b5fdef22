"""`experts` of tokens that come as codes: what is refused, and by whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import experts, quantize, using
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, make_layer

LAYER = make_layer(Case(name="codes", T=6, E=4, K=2, D=128, I=64), torch.bfloat16)
GROUPS = ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128")
# Formats that come as codes, with weights that go with them.
FORMATS = (
    GROUPS, ("float8_e4m3fn:row", "float8_e4m3fn:row"), ("int8:row", "int8:row"),
    ("mxfp4", "mxfp8"), ("mxfp6_e2m3", "mxfp8_e5m2"),
)  # fmt: skip


def floats(w_format: str, x_format: str, **more: Any) -> dict[str, Any]:
    w13, w2 = (packing.quantize(w, Format.of(w_format)) for w in (LAYER.w13_EFD, LAYER.w2_EDI))
    return {
        "x_TD": LAYER.x_TD, "weights_TK": LAYER.weights_TK, "ids_TK": LAYER.ids_TK,
        "w13_EFD": w13.values, "w2_EDI": w2.values, "w13_scale_EFG": w13.scale,
        "w2_scale_EDG": w2.scale, "w_format": w_format, "x_format": x_format, **more,
    }  # fmt: skip


def codes(w_format: str, x_format: str, **more: Any) -> dict[str, Any]:
    call = floats(w_format, x_format)
    q_TD, scale_TG = quantize(call["x_TD"], x_format)
    return {**call, "x_TD": q_TD, "x_scale_TG": scale_TG, "out_dtype": "bfloat16", **more}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f[1])
def test_codes_give_the_bits_of_their_tokens(formats: tuple[str, str], backend: str) -> None:
    given, tokens = codes(*formats), floats(*formats)
    assert experts.refusals(**given)[backend] == experts.refusals(**tokens)[backend]
    if experts.refusals(**given)[backend] is not None:
        pytest.skip(str(experts.refusals(**given)[backend]))
    with using(backend, experts):
        got, want = experts(**given), experts(**tokens)
    assert got.dtype is torch.bfloat16 and torch.equal(got, want)


def test_results_have_the_dtype_that_is_named() -> None:
    assert experts(**codes(*GROUPS, out_dtype="float32")).dtype is torch.float32


def strided(t: Tensor) -> Tensor:
    """The same codes and scales with gaps between them."""
    wide = t.new_zeros(t.shape[0], 2 * t.shape[1])
    wide[:, ::2] = t
    return wide[:, ::2]


@pytest.mark.parametrize("formats", FORMATS[:3], ids=lambda f: f[1])
def test_codes_may_have_any_strides(formats: tuple[str, str]) -> None:
    given = codes(*formats)
    apart = {name: strided(given[name]) for name in ("x_TD", "x_scale_TG")}
    assert torch.equal(experts(**{**given, **apart}), experts(**given))


SCALE = torch.ones(6, 1)
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no x_format": (floats(GROUPS[0], "", out_dtype="bfloat16"), "x_format='' quantises no inputs"),
    "no scales": (codes(*GROUPS, x_scale_TG=None), "x_scale_TG is missing"),
    "floats": (floats(*GROUPS, x_scale_TG=SCALE, out_dtype="bfloat16"), "x_TD must be float8_e4m3"),
    "no dtype": (codes(*GROUPS, out_dtype=""), "out_dtype"),
    "no format": (codes(*GROUPS) | {"x_format": "zero"}, "x_format: format 'zero' is not"),
    "of several rows": (codes(*GROUPS) | {"x_format": GROUPS[0]}, "shares scales between rows"),
    "scales of others": (codes(*GROUPS, x_scale_TG=SCALE[:3]), r"float32 \[6, 1\], got shape"),
    "half scales": (codes(*GROUPS, x_scale_TG=SCALE.half()), r"\[6, 1\], got torch.float16"),
    "of a tensor": (
        floats(*["float8_e4m3fn:tensor"] * 2, x_scale_TG=SCALE, out_dtype="bfloat16"),
        "has a scale that is not a token's own; give floats, and neither",
    ),
    "under a global scale": (
        codes(*GROUPS) | {"x_format": "float8_e4m3fn:1x16:float8_e4m3fn"},
        "has a global scale above those of columns, which does not come with codes",
    ),
    "four bits": (
        floats("mxfp4", "mxfp4", x_scale_TG=SCALE, out_dtype="bfloat16"), "has codes of 4 bits"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_call_of_codes(name: str) -> None:
    call, said = FAULTS[name]
    with pytest.raises((ValueError, TypeError), match=said):
        experts(**call)


def test_backends_that_take_floats_refuse_codes() -> None:
    refused = experts.refusals(**codes(*GROUPS))
    assert refused["aten"] is not None and "does not read" in refused["aten"]
    flashinfer = {n: r for n, r in refused.items() if n.startswith("flashinfer")}
    assert flashinfer and all(flashinfer.values())
    prepared = experts.backends["flashinfer_cutlass"]
    call = experts.call(**codes(*GROUPS, layout="flashinfer.up_gate"))
    assert prepared.ignores is not None and prepared.ignores(call)
