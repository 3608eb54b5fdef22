"""Static scales of inputs, one for each expert: each routed row has that of its expert."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import experts, moe
from moe_ops.conformance.samples import quantized
from moe_ops.conformance.tensors import half_map, with_holes
from moe_ops.testing import Case, make_layer
from tests.ops.refused import Bad, assert_refused

CASE = Case(name="small", T=24, E=4, K=2, D=64, I=32)
LAYER = make_layer(CASE)
E = CASE.E
FORMATS = [
    ("float8_e4m3fn:row", "float8_e4m3fn:tensor"),
    ("int8:tensor", "int8:tensor"),
    ("mxfp6_e2m3", "float8_e4m3fn:tensor"),
    ("nvfp4", "nvfp4"),
]
SCALES = torch.tensor([0.005, 0.02, 0.01, 0.08])
each_format = pytest.mark.parametrize(("w_format", "x_format"), FORMATS)
LISTS: dict[str, Tensor] = {
    "all": LAYER.ids_TK,
    "holes": with_holes(LAYER.ids_TK, E),
    "none": torch.full_like(LAYER.ids_TK, -1),
}


# Of global scales the factors of experts, which contain them.
FACTORS: dict[str, dict[str, Tensor]] = {x_format: {} for _, x_format in FORMATS} | {
    "nvfp4": {n: torch.rand(E) + 0.5 for n in ("global_scale13_E", "global_scale2_E")},
    "int8:row": {},
}


def call_of(w_format: str, x_format: str, ids: Tensor = LAYER.ids_TK) -> dict[str, Any]:
    return {
        "x_TD": LAYER.x_TD, "weights_TK": LAYER.weights_TK, "ids_TK": ids,
        **quantized(LAYER.w13_EFD, w_format, "w13", "FD"),
        **quantized(LAYER.w2_EDI, w_format, "w2", "DI"),
        "b13_EF": LAYER.b13_EF, "w_format": w_format, "x_format": x_format, **FACTORS[x_format],
    }  # fmt: skip


@each_format
@pytest.mark.parametrize("ids", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("names", [("x_scale",), ("h_scale",), ("x_scale", "h_scale")], ids=str)
def test_equal_scales_are_one_scale_to_the_bit(
    w_format: str, x_format: str, ids: Tensor, names: tuple[str, ...]
) -> None:
    call = call_of(w_format, x_format, ids) | {"x_scale": torch.tensor(0.01)}
    call["h_scale"] = torch.tensor([0.03])
    each = {name: call[name].expand(E).clone() for name in names}
    assert torch.equal(experts(**call | each), experts(**call))


@each_format
@pytest.mark.parametrize("ids", LISTS.values(), ids=LISTS)
def test_unequal_scales_are_those_of_a_loop_over_experts(
    w_format: str, x_format: str, ids: Tensor
) -> None:
    call = call_of(w_format, x_format, ids) | {"x_scale": SCALES, "h_scale": SCALES.flip(0)}
    want = torch.zeros_like(LAYER.x_TD)
    for e in range(E):
        one = {"ids_TK": torch.where(ids == e, e, -1).int()}
        one |= {name: call[name][e] for name in ("x_scale", "h_scale")}
        want += experts(**call | one)
    torch.testing.assert_close(experts(**call), want, rtol=1e-6, atol=1e-6)
    if bool((ids >= 0).any()):
        other = experts(**call | {"x_scale": SCALES.amax()})
        assert not torch.allclose(other, want, rtol=1e-3)


@pytest.mark.parametrize(("w_format", "x_format"), FORMATS[::3])
def test_the_scales_of_a_rank_are_of_its_own_experts(w_format: str, x_format: str) -> None:
    call = call_of(w_format, x_format) | {"x_scale": SCALES, "h_scale": SCALES.flip(0)}
    mapped = half_map(E)
    here = [int((mapped == local).nonzero()) for local in range((E + 1) // 2)]
    names = [n for n in call if n.startswith(("w13_", "w2_", "b13", "x_sc", "h_sc", "glob"))]
    mine = {n: call[n][here] for n in names if call[n] is not None} | {"expert_map": mapped}
    own = torch.where(mapped[LAYER.ids_TK.long()] >= 0, LAYER.ids_TK, -1)
    want = experts(**call | {"ids_TK": own})
    torch.testing.assert_close(experts(**call | mine), want, rtol=1e-6, atol=1e-6)
    bad = Bad({"x_scale": SCALES}, "x_scale must be one float32 or one for each of the 2 experts")
    assert_refused(experts, call | mine, bad)


def test_moe_takes_them_too() -> None:
    call = call_of(*FORMATS[0]) | {"x_scale": SCALES, "h_scale": SCALES}
    logits = torch.randn(CASE.T, E)
    weights, ids = logits.softmax(-1).topk(2)
    want = experts(**call | {"weights_TK": weights, "ids_TK": ids.int()})
    del call["weights_TK"], call["ids_TK"]
    got = moe(logits_TE=logits, top_k=2, **call)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


REFUSED = {
    "too_many": (FORMATS[0], torch.ones(E + 1), "each of the 4 experts here, got (5,) of torch.f"),
    "shape": (FORMATS[0], torch.ones(E, 1), "each of the 4 experts here, got (4, 1) of torch.fl"),
    "dtype": (FORMATS[0], torch.ones(E).half(), "experts here, got (4,) of torch.float16"),
    "nvfp4": (("nvfp4", "nvfp4"), torch.ones(3), "each of the 4 experts here, got (3,) of torch"),
    "rows": (("int8:row", "int8:row"), torch.ones(E), "goes with one scale for the tensor or with"),
}


@pytest.mark.parametrize("name", ["x_scale", "h_scale"])
@pytest.mark.parametrize(("formats", "scale", "found"), REFUSED.values(), ids=REFUSED)
def test_other_scales_are_refused(
    formats: tuple[str, str], scale: Tensor, found: str, name: str
) -> None:
    assert_refused(experts, call_of(*formats), Bad({name: scale}, found))


def test_global_scales_of_inputs_are_in_factors() -> None:
    call = call_of("nvfp4", "nvfp4") | {"x_scale": SCALES, "h_scale": SCALES}
    experts(**call)
    for name, factors in (("x_scale", "global_scale13_E"), ("h_scale", "global_scale2_E")):
        said = f"{name} has a global scale for the input of each expert, which {factors} is to"
        assert_refused(experts, call, Bad({factors: None}, said))


def test_there_is_no_gradient() -> None:
    call = call_of(*FORMATS[0]) | {"x_scale": SCALES, "h_scale": SCALES}
    call["x_TD"] = LAYER.x_TD.clone().requires_grad_()
    with pytest.raises(ValueError, match="quantize has no gradient, as rounding is flat"):
        experts(**call).sum().backward()
