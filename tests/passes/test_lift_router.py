"""`lift_router`: each spelling of a router becomes `route` with its arguments, and nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import operator
import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._inductor.virtualized import V

from moe_ops.ops.route import route
from moe_ops.passes.lift_router import lift_router
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.routing.check import disagreement
from moe_ops.passes.routing.router import Routing, read
from moe_ops.testing import Tol, assert_close
from tests.passes.near_misses import OTHERS
from tests.passes.post_grad import Compiled, text
from tests.passes.routed_layers import by_choice, over_ranks, there_and_back
from tests.passes.routers import ROUTERS, E, K, Router, each_router

ops = torch.ops.moe_ops
slow = pytest.mark.slow  # half a second for each of many graphs
PARAMETERS = inspect.signature(route).parameters
D = 16
TOL = {
    torch.float32: Tol(1e-5, "float32 sums in another order"),
    torch.bfloat16: Tol(2e-2, "weights and products rounded to 8 bits of mantissa"),
}


class Lift:
    """The pass as a hook that keeps what it said."""

    def __init__(self) -> None:
        self.context, self.count, self.before = Context(), 0, ""

    def __call__(self, graph: fx.Graph) -> None:
        self.before = text(graph)
        self.count = lift_router(graph, self.context)
        assert lift_router(graph, Context()) == 0, "the pass is not idempotent"


def layer(router: Router) -> Any:
    """An expert layer whose experts a router chooses."""

    def forward(
        x_TD: Tensor, gate_DE: Tensor, bias_E: Tensor, scale_E: Tensor, w_EFD: Tensor
    ) -> Tensor:
        weights_TK, ids_TK = router(x_TD @ gate_DE, bias_E, scale_E)
        return experts(x_TD, weights_TK, ids_TK, w_EFD)

    return forward


def experts(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w_EFD: Tensor) -> Tensor:
    """One product for each chosen expert, weighted and summed."""
    x_RD, rows_R, ends_E = ops.dispatch(x_TD, ids_TK, E)
    return ops.combine(ops.expert_gemm(x_RD, w_EFD, ends_E), weights_TK, rows_R)


def inputs(T: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """What a layer takes. Biases matter and keep scores above zero; few experts are near a tie."""
    generator = torch.Generator().manual_seed(T)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    bias, scale = random(E).abs() / 4, random(E).abs() + 0.5
    return random(T, D), random(D, E) / 2, bias, scale, random(E, D, D)


def lifted(router: Router, *args: Tensor, dynamic: bool = False) -> tuple[Lift, Compiled]:
    """A layer with this router, compiled and run."""
    hook = Lift()
    compiled = Compiled(layer(router), hook, dynamic)
    compiled(*args)
    return hook, compiled


def arguments(graph: fx.Graph) -> dict[str, Any]:
    """The arguments of the graph's one `route` that are not their defaults; tensors are True."""
    (node,) = graph.find_nodes(op="call_function", target=ops.route.default)
    given = zip(PARAMETERS.values(), node.args, strict=True)
    found = {p.name: a for p, a in given if a != p.default and p.name != "logits_TE"}
    return {n: True if isinstance(a, fx.Node) else a for n, a in found.items()}


def expected(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that a router of the table must get, without defaults."""
    wanted = {"top_k": K} | ROUTERS[name][1]
    if wanted.get("out_dtype") == "as logits":
        wanted["out_dtype"] = str(dtype).removeprefix("torch.")
    return {n: a for n, a in wanted.items() if a != PARAMETERS[n].default}


@slow
@pytest.mark.parametrize(("name", "dtype", "dynamic"), list(each_router()))
def test_a_router_becomes_one_call(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    router, _ = ROUTERS[name]
    hook, compiled = lifted(router, *inputs(24, dtype), dynamic=dynamic)
    assert hook.count == 1, hook.context.refusals
    (graph,) = compiled.graphs
    assert pytest.approx(arguments(graph)) == expected(name, dtype)
    assert "aten.topk" not in text(graph)
    for T in (24, 9) if dynamic else (24,):
        args = inputs(T, dtype)
        want = layer(router)(*args)
        assert_close(compiled(*args), want, TOL[dtype], f"{name}, {T} tokens")
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize(
    "layer_of", [over_ranks, there_and_back, by_choice], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["one size", "any size"])
def test_a_router_of_tokens_that_are_sent_becomes_one_call(layer_of: Any, dynamic: bool) -> None:
    router, _ = ROUTERS["softmax_renormalised"]

    def forward(x_TD: Tensor, gate_DE: Tensor, w_EFD: Tensor) -> Tensor:
        weights_TK, ids_TK = router(x_TD @ gate_DE.view(D, E), None, None)
        return layer_of(x_TD, weights_TK, ids_TK, w_EFD)

    hook = Lift()
    compiled = Compiled(forward, hook, dynamic)
    for T in (24, 9) if dynamic else (24,):
        x_TD, gate_DE, _, _, w_EFD = inputs(T)
        got, want = compiled(x_TD, gate_DE, w_EFD), forward(x_TD, gate_DE, w_EFD)
        assert_close(got, want, TOL[torch.float32], f"{T} tokens")
    assert hook.count == 1, hook.context.refusals
    (graph,) = compiled.graphs
    assert arguments(graph) == expected("softmax_renormalised", torch.float32)
    assert "aten.topk" not in text(graph)


@pytest.mark.parametrize("name", ["softmax_renormalised", "sigmoid_groups", "sigmoid_one_group"])
def test_one_token(name: str) -> None:
    router, _ = ROUTERS[name]
    hook, compiled = lifted(router, *inputs(1))
    assert hook.count == 1, hook.context.refusals
    assert arguments(compiled.graphs[0]) == expected(name, torch.float32)


@slow
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_route_stays(name: str) -> None:
    router, reason = OTHERS[name]
    hook, compiled = lifted(router, *inputs(16))
    assert hook.count == 0 and not hook.context.rewrites
    (note,) = hook.context.refusals
    assert re.search(reason, note.text), note.text
    assert text(compiled.graphs[0]) == hook.before


@slow
def test_the_graph_before_and_after() -> None:
    hook, compiled = lifted(ROUTERS["softmax_renormalised"][0], *inputs(24))
    assert_expected_inline(
        hook.before,
        """\
arg0_1: float32[24, 16]
arg1_1: float32[16, 12]
arg2_1: float32[12, 16, 16]
mm = aten.mm(arg0_1, arg1_1)  # float32[24, 12]
amax = aten.amax(mm, [-1], True)  # float32[24, 1]
sub = aten.sub.Tensor(mm, amax)  # float32[24, 12]
exp = aten.exp(sub)  # float32[24, 12]
sum_1 = aten.sum.dim_IntList(exp, [-1], True)  # float32[24, 1]
div = aten.div.Tensor(exp, sum_1)  # float32[24, 12]
topk = aten.topk(div, 3)
getitem = getitem(topk, 0)  # float32[24, 3]
getitem_1 = getitem(topk, 1)  # int64[24, 3]
dispatch = moe_ops.dispatch(arg0_1, getitem_1, 12)
getitem_2 = getitem(dispatch, 0)  # float32[72, 16]
getitem_3 = getitem(dispatch, 1)  # int32[72]
getitem_4 = getitem(dispatch, 2)  # int32[12]
expert_gemm = moe_ops.expert_gemm(getitem_2, arg2_1, getitem_4)  # float32[72, 16]
sum_2 = aten.sum.dim_IntList(getitem, [-1], True)  # float32[24, 1]
div_1 = aten.div.Tensor(getitem, sum_2)  # float32[24, 3]
combine = moe_ops.combine(expert_gemm, div_1, getitem_3)  # float32[24, 16]
return [combine]""",
    )
    assert_expected_inline(
        text(compiled.graphs[0]),
        """\
arg0_1: float32[24, 16]
arg1_1: float32[16, 12]
arg2_1: float32[12, 16, 16]
mm = aten.mm(arg0_1, arg1_1)  # float32[24, 12]
route_default = moe_ops.route(mm, 3, renormalize=True)
getitem_5 = getitem(route_default, 0)  # float32[24, 3]
getitem_6 = getitem(route_default, 1)  # int32[24, 3]
dispatch = moe_ops.dispatch(arg0_1, getitem_6, 12)
getitem_2 = getitem(dispatch, 0)  # float32[72, 16]
getitem_3 = getitem(dispatch, 1)  # int32[72]
getitem_4 = getitem(dispatch, 2)  # int32[12]
expert_gemm = moe_ops.expert_gemm(getitem_2, arg2_1, getitem_4)  # float32[72, 16]
combine = moe_ops.combine(expert_gemm, getitem_5, getitem_3)  # float32[24, 16]
return [combine]""",
    )
    (note,) = hook.context.rewrites
    assert (note.rule, note.node, note.layer) == ("lift_router", "topk", "")
    assert note.text == "top_k=3, score=softmax, renormalize=True"


@slow
def test_others_keep_what_they_read() -> None:
    def forward(x, gate, bias, w):
        logits = x @ gate
        scores = logits.float().softmax(-1)
        values, ids = (scores + bias).topk(K)
        weights = scores.gather(1, ids)
        total = weights / weights.sum(-1, keepdim=True)
        return experts(x, total, ids, w), logits, scores, values, ids, weights, total

    args = [inputs(24)[i] for i in (0, 1, 2, 4)]
    hook = Lift()
    compiled = Compiled(forward, hook)
    got, want = compiled(*args), forward(*args)
    assert hook.count == 1, hook.context.refusals
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@slow
def test_values_in_no_order_that_others_read_stay() -> None:
    def forward(x, gate, w):
        values, ids = (x @ gate).sigmoid().topk(K, sorted=False)
        return experts(x, 2 * values, ids, w), values

    args = [inputs(24)[i] for i in (0, 1, 4)]
    hook = Lift()
    Compiled(forward, hook)(*args)
    (note,) = hook.context.refusals
    assert "whose order is not defined, is also used" in note.text


@slow
def test_two_layers_of_one_router() -> None:
    def forward(x, gate, w):
        values, ids = (x @ gate).sigmoid().topk(K)
        return experts(experts(x, values, ids, w), values, ids, w)

    args = [inputs(24)[i] for i in (0, 1, 4)]
    hook = Lift()
    compiled = Compiled(forward, hook)
    assert_close(compiled(*args), forward(*args), TOL[torch.float32], "two layers")
    assert hook.count == 1 and not hook.context.refusals


@slow
def test_the_op_experts_has_a_router_too() -> None:
    def forward(x, gate, w13, w2):
        values, ids = (x @ gate).softmax(-1).topk(K)
        return ops.experts(x, values, ids, w13, w2)

    x, gate, _, _, w = inputs(24)
    args = (x, gate, w, w[:, :, : D // 2].contiguous())
    hook = Lift()
    compiled = Compiled(forward, hook)
    assert_close(compiled(*args), forward(*args), TOL[torch.float32], "experts")
    assert hook.count == 1, hook.context.refusals
    assert arguments(compiled.graphs[0]) == {"top_k": K}


@slow
def test_a_scale_that_is_no_number_stays_outside() -> None:
    class Layer(torch.nn.Module):
        route_scale = 1.5

        def forward(self, x, gate, w):
            values, ids = (x @ gate).sigmoid().topk(K)
            return experts(x, (values * self.route_scale).bfloat16(), ids, w)

    args = [inputs(24)[i] for i in (0, 1, 4)]
    hook = Lift()
    compiled = Compiled(Layer(), hook, dynamic=True)
    assert_close(compiled(*args), Layer()(*args), TOL[torch.bfloat16], "scaled")
    assert hook.count == 1, hook.context.refusals
    assert arguments(compiled.graphs[0]) == {"top_k": K, "score": "sigmoid"}
    assert "mul" in text(compiled.graphs[0])


@slow
def test_batch_and_sequence_may_both_be_unknown() -> None:
    router = ROUTERS["sigmoid_groups"][0]

    def forward(x, gate, bias, scale, w):
        return layer(router)(x.reshape(-1, D), gate, bias, scale, w).view(x.shape)

    hook = Lift()
    compiled = Compiled(forward, hook, dynamic=True)
    for batch, length in ((2, 7), (5, 3)):
        x, *others = inputs(batch * length)
        x = x.view(batch, length, D)
        want = forward(x, *others)
        assert_close(compiled(x, *others), want, TOL[torch.float32], f"{batch} x {length}")
    assert hook.count == 1 and len(compiled.graphs) == 1


@slow
def test_softmax_as_inductor_has_it_on_gpus() -> None:
    from torch._inductor.inductor_prims import prepare_softmax_online

    aten = torch.ops.aten

    def online(graph: fx.Graph) -> None:
        """What Inductor's `prepare_softmax_replacement` does to the one softmax."""
        (largest,) = graph.find_nodes(op="call_function", target=aten.amax.default)
        (total,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
        with graph.inserting_before(largest):
            both = graph.call_function(prepare_softmax_online, (largest.args[0], -1))
            pair = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
        both.meta["val"] = (largest.meta["val"], total.meta["val"])
        for old, new in zip((largest, total), pair, strict=True):
            new.meta["val"] = old.meta["val"]
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        hook(graph)

    hook = Lift()
    compiled = Compiled(layer(ROUTERS["softmax"][0]), online)
    args = inputs(24)
    assert_close(compiled(*args), layer(ROUTERS["softmax"][0])(*args), TOL[torch.float32], "online")
    assert "prepare_softmax_online" in hook.before
    assert hook.count == 1, hook.context.refusals
    assert arguments(compiled.graphs[0]) == {"top_k": K}


@slow
def test_equal_layers_are_checked_once_and_quietly() -> None:
    router = ROUTERS["sigmoid_groups"][0]

    def forward(x, gate, bias, scale, w):
        for _ in range(6):
            x = layer(router)(x, gate, bias, scale, w)
        return x

    hook = Lift()

    def in_modes(graph: fx.Graph) -> None:
        with V.fake_mode, torch.device("meta"):
            hook(graph)

    disagreement.cache_clear()
    state = torch.get_rng_state()
    Compiled(forward, in_modes)(*inputs(24))
    assert hook.count == 6, hook.context.refusals
    assert disagreement.cache_info().misses == 1
    assert torch.equal(torch.get_rng_state(), state)


@slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"score": "softmax"}, "it chooses other experts|its weights are others"),
        ({"topk_group": 3}, "it chooses other experts"),
        ({"group_reduce": "max"}, "it chooses other experts"),
        ({"scale": 2.25}, "its weights are others"),
        ({"renormalize": False}, "its weights are others"),
        ({"top_k": 4}, "it gives .* ids"),
    ],
    ids=str,
)
def test_a_wrong_reading_is_found_by_numbers(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misread(ids: Any, weights: Any) -> Routing:
        found = read(ids, weights)
        return dataclasses.replace(found, arguments=found.arguments | change)

    # `moe_ops.passes` has the function under the module's name.
    module = importlib.import_module("moe_ops.passes.lift_router")
    monkeypatch.setattr(module, "read", misread)
    hook, _ = lifted(ROUTERS["sigmoid_groups"][0], *inputs(24))
    (note,) = hook.context.refusals
    assert re.search(f"checked with numbers, {reason}", note.text), note.text
