"""`MoELayer` with some of its experts alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.graphs.addresses import identities, state_of
from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.ops import route
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Tol, assert_close
from tests.layer.shards import randomize

TOL = Tol(1e-5, "float32 sums in another order")
E, KEPT = 8, (0, 2, 5, 7)
SIZES: dict[str, Any] = {
    "num_experts": E, "top_k": 2, "hidden_size": 64, "intermediate_size": 32, "internal_gate": True,
}  # fmt: skip
GROUPED = Routing(
    score="sigmoid", correction_bias=True, n_group=2, topk_group=1, renormalize=True, eps=1e-20
)
STATIC = QuantConfig(weights="nvfp4", inputs="nvfp4", static_inputs=True, per_expert_inputs=True)
CASES: dict[str, dict[str, Any]] = {
    "softmax_of_all": {},
    "grouped_with_bias": {"routing": GROUPED},
    "biases": {"bias": True, "routing": Routing(renormalize=True)},
    "gate_with_bias": {"internal_gate": nn.Linear(64, E)},
    "logits_given": {"internal_gate": False},
    "fused_shared": {"shared_experts": 2},
    "int8": {"quant": "int8:row"},
    "uint4": {"quant": "uint4:1x32", "bias": True},
    "mxfp4": {"quant": "mxfp4"},
    "scales_of_inputs": {"quant": STATIC},
}


def made(**options: Any) -> MoELayer:
    return randomize(MoELayer(**{**SIZES, **copy.deepcopy(options)}))


def given(layer: MoELayer) -> tuple[Tensor, Tensor]:
    """Tokens and the logits of all experts."""
    g = torch.Generator().manual_seed(0)
    x_TD = torch.randn(9, 64, generator=g)
    if layer.gate is None:
        return x_TD, 2 * torch.randn(9, E, generator=g)
    return x_TD, layer.gate(x_TD)


def among(layer: MoELayer, x_TD: Tensor, logits_TE: Tensor) -> Tensor:
    """What the whole layer gives where the others have logits of -inf, and biases likewise."""
    others = torch.ones(E, dtype=torch.bool).index_fill(0, torch.tensor(KEPT), False)
    bias_E = layer.correction_bias
    if bias_E is not None:
        bias_E = bias_E.masked_fill(others, -torch.inf)
    logits_TE = logits_TE.masked_fill(others, -torch.inf)
    weights_TK, ids_TK = route(logits_TE, layer.top_k, bias_E, **layer.routing.options)
    shared = layer.placement.shared
    fused = torch.arange(E, E + shared, dtype=ids_TK.dtype).expand(len(ids_TK), shared)
    weights_TK = torch.cat((weights_TK, torch.ones(len(ids_TK), shared)), 1)
    return layer.run_experts(x_TD, weights_TK, torch.cat((ids_TK, fused), 1))


def own_logits(layer: MoELayer, logits_TE: Tensor) -> tuple[Tensor, ...]:
    return () if layer.gate is not None else (logits_TE[:, list(KEPT)],)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@torch.no_grad()
def test_results_are_those_of_logits_of_minus_infinity(options: dict[str, Any]) -> None:
    layer = made(**options)
    x_TD, logits_TE = given(layer)
    want = among(layer, x_TD, logits_TE)
    report = moe_ops.restrict_experts(layer, KEPT)
    assert_close(layer(x_TD, *own_logits(layer, logits_TE)), want, TOL, "restricted")
    assert report.kept == {"layer": KEPT} and not report.removed
    held = sum(t.nbytes for t in layer.expert_tensors().values())
    assert report.bytes_after < report.bytes_before and held <= report.bytes_after


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@torch.no_grad()
def test_its_state_is_that_of_a_layer_made_with_so_many(options: dict[str, Any]) -> None:
    layer = made(**options)
    x_TD, logits_TE = given(layer)
    moe_ops.restrict_experts(layer, KEPT)
    gate = nn.Linear(64, len(KEPT)) if "internal_gate" in options and layer.gate else None
    less = {"num_experts": len(KEPT), **({"internal_gate": gate} if gate else {})}
    fresh = made(**{**options, **less})
    fresh.load_state_dict(layer.state_dict())
    args = (x_TD, *own_logits(layer, logits_TE))
    assert torch.equal(fresh(*args), layer(*args))
    assert repr(fresh) == repr(layer)
    layer.reset_parameters()
    assert layer(*args).shape == x_TD.shape


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@torch.no_grad()
def test_what_went_to_the_cpu_comes_back(options: dict[str, Any]) -> None:
    layer = made(**options)
    x_TD, logits_TE = given(layer)
    args = (x_TD,) if layer.gate is not None else (x_TD, logits_TE)
    before, text, want = copy.deepcopy(layer.state_dict()), repr(layer), layer(*args)
    report = moe_ops.restrict_experts(layer, KEPT, removed="cpu")
    assert report.removed["layer.w13_weight"].shape[0] == E - len(KEPT)
    report.undo()
    assert torch.equal(layer(*args), want) and repr(layer) == text
    after = layer.state_dict()
    assert before.keys() == after.keys()
    for name, t in before.items():
        assert torch.equal(t.view(torch.uint8), after[name].view(torch.uint8)), name
    with pytest.raises(ValueError, match="was undone before"):
        report.undo()


def test_restrictions_are_undone_from_the_last_on() -> None:
    layer = made()
    first = moe_ops.restrict_experts(layer, KEPT, removed="cpu")
    last = moe_ops.restrict_experts(layer, (1, 3), removed="cpu")
    with pytest.raises(ValueError, match=r"has 2 experts, not the 4 .*; undo the later one first"):
        first.undo()
    last.undo()
    first.undo()
    assert torch.equal(layer.w13_weight, made().w13_weight)


def test_freed_weights_do_not_come_back() -> None:
    report = moe_ops.restrict_experts(made(), KEPT)
    with pytest.raises(ValueError, match=r"freed; load the model again, .*removed='cpu'"):
        report.undo()


def test_layers_of_a_module_are_named() -> None:
    model = nn.ModuleDict({"a": made(), "b": made()})
    moe_ops.restrict_experts(model, {"b": KEPT})
    assert [layer.num_experts for layer in model.values()] == [E, len(KEPT)]
    moe_ops.restrict_experts(model, (0, 1, 2))
    assert [layer.num_experts for layer in model.values()] == [3, 3]
    assert model["a"](torch.randn(4, 64)).shape == (4, 64)


def test_what_was_captured_is_captured_again() -> None:
    layer = made()
    before = identities(state_of(layer))
    moe_ops.restrict_experts(layer, KEPT)
    assert identities(state_of(layer)) != before


def test_gradients_are_of_the_kept_experts() -> None:
    layer = made()
    moe_ops.restrict_experts(layer, KEPT)
    layer(torch.randn(5, 64)).sum().backward()
    assert layer.w13_weight.grad is not None
    assert layer.w13_weight.grad.shape[0] == layer.gate.weight.grad.shape[0] == len(KEPT)


def with_gradient() -> MoELayer:
    layer = made()
    layer(torch.randn(5, 64)).sum().backward()
    return layer


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "one_of_many": (
        lambda: made(parallel=ParallelConfig.of(tp=2, expert_parallel=True)), KEPT,
        r"layer cannot be restricted: it is of one rank among others .*; restrict a layer of one",
    ),
    "balanced": (lambda: made(balanced=True), KEPT, r"loads and replicas; make it without"),
    "custom": (
        lambda: made(routing=Routing(custom=lambda x, logits, k: logits.topk(k))), KEPT,
        r"its custom routing may know experts by their number",
    ),
    "gate": (
        lambda: made(internal_gate=nn.Sequential(nn.Linear(64, E))), KEPT,
        r"its gate is a Sequential, .*; take an nn.Linear, or give forward the logits",
    ),
    "too_few": (made, (5,), r"keeps 1 experts, and a token has top_k=2; keep at least as many"),
    "uneven_groups": (
        lambda: made(routing=GROUPED), (0, 1, 2, 7), r"keeps 3, 1 experts of its 2 groups of 4",
    ),
    "meta": (lambda: made().to("meta"), KEPT, r"layer\.w13_weight is on the meta device"),
    "gradient": (with_gradient, KEPT, r"has a gradient, .*zero_grad\(set_to_none=True\)"),
    "none": (lambda: nn.Linear(2, 2), KEPT, r"Linear has no experts to restrict; give a Mixture"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "keep", "text"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_changes_nothing(make: Any, keep: Any, text: str) -> None:
    layer = make()
    before = {name: t.data_ptr() for name, t in layer.state_dict().items()}
    shown = repr(layer)
    with pytest.raises(ValueError, match=text):
        moe_ops.restrict_experts(layer, keep)
    assert {name: t.data_ptr() for name, t in layer.state_dict().items()} == before
    assert repr(layer) == shown


def test_arguments_that_are_none() -> None:
    with pytest.raises(TypeError, match="model must be a module"):
        moe_ops.restrict_experts("model", KEPT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"removed.*freed.*cpu"):
        moe_ops.restrict_experts(made(), KEPT, removed="gone")


def test_a_layer_without_a_refusal_is_kept_whole_by_another_s() -> None:
    model = nn.ModuleDict({"a": made(), "b": made(balanced=True)})
    with pytest.raises(ValueError, match="b cannot be restricted"):
        moe_ops.restrict_experts(model, KEPT)
    assert model["a"].num_experts == E and model["a"].w13_weight.shape[0] == E
