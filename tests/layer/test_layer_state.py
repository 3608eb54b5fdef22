"""What a cast and a state dict may do to a layer's codes and scales."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.quant.config import QuantConfig
from tests.layer.shards import randomize

SIZES: dict[str, Any] = {
    "num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 64, "bias": True,
    "internal_gate": True,
}  # fmt: skip
FORMATS = {
    "int8": QuantConfig(weights="int8:row"),
    "uint4": QuantConfig(weights="uint4:1x32"),
    "bf16_scales": QuantConfig(weights="int4:1x32:bfloat16"),
    "fp8": QuantConfig(weights="float8_e4m3fn:row", inputs="float8_e4m3fn:row"),
    "static": QuantConfig(
        weights="float8_e4m3fn:tensor", inputs="float8_e4m3fn:tensor", static_inputs=True
    ),
    "mxfp4": QuantConfig(weights="mxfp4"),
    "nvfp4": QuantConfig(weights="nvfp4", inputs="nvfp4", static_inputs=True),
}


def layer_of(quant: Any, **more: Any) -> MoELayer:
    return randomize(MoELayer(**{**SIZES, **more}, quant=quant))


def coded(layer: MoELayer) -> dict[str, Tensor]:
    own = {n: getattr(layer, n) for n in layer.coded()}
    return {n: t.detach().clone() for n, t in own.items() if t is not None}


def unchanged(layer: MoELayer, before: dict[str, Tensor]) -> bool:
    now = coded(layer)
    return now.keys() == before.keys() and all(
        t.dtype == now[n].dtype and torch.equal(t.view(torch.uint8), now[n].view(torch.uint8))
        for n, t in before.items()
    )


@pytest.mark.parametrize("quant", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_leaves_codes_and_scales_and_takes_the_rest(
    quant: QuantConfig, dtype: torch.dtype
) -> None:
    routing = Routing(correction_bias=True)
    layer, made = layer_of(quant, routing=routing), layer_of(quant, routing=routing, dtype=dtype)
    before, x = coded(layer), torch.randn(5, 128, dtype=dtype)
    with torch.no_grad():
        assert layer(x.float()).dtype == torch.float32
        for cast in (lambda m: m.to(dtype), lambda m: m.to("cpu", dtype)):
            assert unchanged(cast(layer.float()), before)
            assert layer.gate.weight.dtype == layer.w13_bias.dtype == dtype
        made.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), made(x))
    assert {n: t.dtype for n, t in before.items()} == {
        n: t.dtype for n, t in coded(layer.to("meta", torch.float32)).items()
    }


def test_a_plain_layer_is_cast_whole() -> None:
    layer = layer_of(None)
    assert {p.dtype for p in layer.bfloat16().parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("quant", FORMATS.values(), ids=FORMATS)
def test_codes_are_not_loaded_as_weights_nor_weights_as_codes(
    quant: QuantConfig, strict: bool
) -> None:
    coded_layer, plain = layer_of(quant), layer_of(None)
    before = coded(coded_layer)
    for layer, other in ((plain, coded_layer), (coded_layer, plain)):
        state = copy.deepcopy(layer.state_dict())
        with pytest.raises(RuntimeError, match=r"w13_weight is torch\.\w+ in the state dict, but"):
            layer.load_state_dict(other.state_dict(), strict=strict)
        assert all(torch.equal(state[n], layer.state_dict()[n]) for n in ("w13_bias", "w2_weight"))
    assert unchanged(coded_layer, before)


def test_scales_of_another_dtype_are_refused() -> None:
    layer, other = layer_of(FORMATS["bf16_scales"]), layer_of(QuantConfig(weights="int4:1x32"))
    with pytest.raises(
        RuntimeError, match=r"w13_scale is torch\.float32 .* but torch\.bfloat16 in"
    ):
        layer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
@pytest.mark.parametrize(("given", "own"), [("int4:1x64", "nf4"), ("nf4", "int4:1x64")])
def test_codes_of_a_format_with_the_same_shapes_are_refused(
    given: str, own: str, nested: bool
) -> None:
    pair = [layer_of(QuantConfig(weights=format), intermediate_size=128) for format in (given, own)]
    saved, held = (nn.Sequential(layer) if nested else layer for layer in pair)
    before, file = coded(pair[1]), io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    name = "0." if nested else "MoELayer"
    said = rf"{name} has codes of {given} in the state dict, but of {own} in this MoELayer, .*load"
    with pytest.raises(RuntimeError, match=said):
        held.load_state_dict(state, strict=False)
    assert all(torch.equal(before[n], t) for n, t in coded(pair[1]).items())
    for code in [n for n in state if n.rpartition(".")[2] in before]:
        del state[code]
    held.load_state_dict(state, strict=False)  # what is left has no format
    assert torch.equal(pair[1].gate.weight, pair[0].gate.weight)


def test_a_state_dict_of_the_same_format_loads_in_16_and_in_32_bits() -> None:
    layer = layer_of(FORMATS["uint4"])
    for other in (layer_of(FORMATS["uint4"]), layer_of(FORMATS["uint4"]).bfloat16()):
        other.load_state_dict(layer.state_dict())
        assert unchanged(other, coded(layer))
    plain = layer_of(None).bfloat16()
    plain.load_state_dict(layer_of(None).state_dict())  # floats are rounded as ever
