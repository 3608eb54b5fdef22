"""The target "ort": which calls become a node of ONNX Runtime, and how the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import moe_ops
from moe_ops import experts, moe
from moe_ops.exporting.positive import is_proven
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import GPT_OSS, Case, Layer, make_layer
from tests.exporting.test_tables import targets_in

CASE = Case(name="node", T=6, E=4, K=2, D=32, I=16)
SYMBOLIC = "onnx_symbolic._symbolic.default"


def graph_of(function: Callable[..., Tensor], *args: Tensor, **options: bool) -> fx.GraphModule:
    table = moe_ops.decompositions("ort", **options)
    return make_fx(function, table, tracing_mode="fake")(*args)


def node_in(graph: fx.GraphModule) -> dict[str, Any]:
    """The attributes of the one node, by name, with its operator as "op"."""
    (node,) = (n for n in graph.graph.nodes if str(n.target) == SYMBOLIC)
    said = node.kwargs
    found: dict[str, Any] = {"op": f"{said['domain']}::{node.args[1]}"}
    kinds = {"i": "attr_ints", "f": "attr_floats", "s": "attr_strs"}
    for i, (key, kind) in enumerate(zip(said["attr_keys"], said["attr_types"], strict=True)):
        begin, end = said["attr_pos"][i]
        (found[key],) = said[kinds[kind]][begin:end]
    return found


def routed(**options: Any) -> Callable[..., Tensor]:
    def call(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return moe(x, logits, w13, w2, CASE.K, **options)

    return call


def plain(layer: Layer) -> tuple[Tensor, ...]:
    return layer.x_TD, layer.logits_TE, layer.w13_EFD, layer.w2_EDI


def test_the_node_says_the_layer() -> None:
    graph = graph_of(
        routed(score="logit", softmax_selected=True, **GPT_OSS), *plain(make_layer(CASE))
    )
    found = node_in(graph)
    assert found.pop("activation_alpha") == pytest.approx(1.702)
    assert found == {
        "op": "com.microsoft::MoE", "k": 2, "activation_type": "swiglu", "swiglu_fusion": 1,
        "activation_beta": 1.0, "normalize_routing_weights": 1, "swiglu_limit": 1.5,
    }  # fmt: skip
    assert torch.ops.aten.mm.default not in targets_in(graph)


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "renormalize": {"renormalize": True, "eps": 1e-6, "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "renormalize": True, "min_sum": 1e-3},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "groups": {"score": "sigmoid", "n_group": 2, "topk_group": 1, "group_fill": "zero_weight"},
    "to_bfloat16": {"weights_dtype": "bfloat16"},
}


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_weights_of_a_router_are_proven(router: dict[str, Any]) -> None:
    assert node_in(graph_of(routed(**router), *plain(make_layer(CASE))))["op"].endswith("::MoE")


UNPROVEN: dict[str, dict[str, Any]] = {
    "logits": {"score": "logit"},
    "negative_scale": {"scale": -1.0},
    "negative_eps": {"renormalize": True, "eps": -1e-3},
}


@pytest.mark.parametrize("router", UNPROVEN.values(), ids=UNPROVEN)
def test_weights_that_may_be_negative_are_refused(router: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"weights_TK=.*assume_positive=True"):
        graph_of(routed(**router), *plain(make_layer(CASE)))


def test_weights_that_are_inputs_want_a_word() -> None:
    layer = make_layer(CASE)
    given = layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI
    with pytest.raises(
        NotImplementedError, match=r"say so by decompositions\('ort', assume_positive=True\), or"
    ):
        graph_of(lambda *args: experts(*args), *given)
    assert node_in(graph_of(lambda *args: experts(*args), *given, assume_positive=True))


PROOFS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "softmax": (lambda t: t.softmax(-1), True),
    "moved": (lambda t: t.sigmoid().view(-1)[:3].to(torch.float16), True),
    "largest": (lambda t: t.softmax(-1).topk(2).values, True),
    "quotient": (lambda t: t.exp() / t.exp().sum(), True),
    "clamped": (lambda t: t.sigmoid().clamp(min=1e-6, max=1.0), True),
    "clamped_below": (lambda t: t.sigmoid().clamp(max=-1.0), False),
    "factor_of_a_sum": (lambda t: torch.add(t.sigmoid(), t.exp(), alpha=-1), False),
    "difference": (lambda t: t.sigmoid() - 0.5, False),
    "negative_factor": (lambda t: t.sigmoid() * -1.0, False),
    "negative_term": (lambda t: t.sigmoid() + -1.0, False),
    "factor_of_input": (lambda t: t.sigmoid() * t, False),
    "filled": (lambda t: t.sigmoid().masked_fill(t > 0, -1.0), False),
    "softplus": (lambda t: functional.softplus(t), True),
    "softplus_of_a_factor": (lambda t: functional.softplus(t, beta=-1.0), False),
    "softplus_past_a_threshold": (lambda t: functional.softplus(t, threshold=-9.0), False),
    "input": (lambda t: t, False),
}


@pytest.mark.parametrize(("function", "proven"), PROOFS.values(), ids=PROOFS)
def test_proofs(function: Callable[[Tensor], Tensor], proven: bool) -> None:
    seen = []

    def look(t: Tensor) -> Tensor:
        made = function(t)
        seen.append(is_proven(made))
        return made

    make_fx(look)(torch.randn(4, 4))
    assert seen == [proven]


def coded(format: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A layer in a format, as a function of its tensors."""
    layer = make_layer(CASE)
    first, second = (packing.quantize(w, Format.of(format)) for w in (layer.w13_EFD, layer.w2_EDI))
    tensors = {
        "w13_scale_EFG": first.scale, "w2_scale_EDG": second.scale,
        "w13_zero_EFG": first.zero, "w2_zero_EDG": second.zero,
    }  # fmt: skip
    given = {name: t for name, t in tensors.items() if t is not None}

    def call(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, *more: Tensor) -> Tensor:
        named: dict[str, Any] = dict(zip(given, more, strict=True))
        return moe(x, logits, w13, w2, CASE.K, w_format=format, **named)

    return call, [layer.x_TD, layer.logits_TE, first.values, second.values, *given.values()]


@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("uint4:1x16", {"expert_weight_bits": 4, "block_size": 16}),
        ("int8:row", {"expert_weight_bits": 8}),
    ],
)
def test_codes_stay_codes(format: str, said: dict[str, int]) -> None:
    call, tensors = coded(format)
    found = node_in(graph_of(call, *tensors))
    assert found["op"] == "com.microsoft::QMoE"
    assert found["weights_prepacked"] == 0
    assert {name: found[name] for name in said} == said
    assert ("block_size" in found) == ("block_size" in said)


@pytest.mark.parametrize("format", ["uint4:1x8", "int4:1x16", "mxfp4", "int8:1x16", "uint4:row"])
def test_other_formats_are_refused(format: str) -> None:
    call, tensors = coded(format)
    with pytest.raises(NotImplementedError, match=f"w_format='{format}' is neither uint4:1xG"):
        graph_of(call, *tensors)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gelu": ({"kind": "gelu"}, "kind='gelu' is no gated silu"),
    "map": ({"expert_map": torch.arange(4)}, r"expert_map=\(4,\) sends experts away"),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_a_node_cannot_say(options: dict[str, Any], said: str) -> None:
    with pytest.raises(NotImplementedError, match=said) as caught:
        graph_of(routed(**options), *plain(make_layer(CASE)))
    assert "moe_ops.experts: " in str(caught.value)
    assert "decompositions('onnx')" in str(caught.value)


def test_other_dtypes_are_refused() -> None:
    layer = make_layer(CASE, torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"x_TD=torch.bfloat16 is neither float32 nor"):
        graph_of(routed(), *plain(layer))
