"""`lift_grouped_mm` and `lift_batched_mm`: what they take, what they leave, and the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from moe_ops.passes.fuse_experts import fuse_experts
from moe_ops.passes.lift_batched_mm import lift_batched_mm
from moe_ops.passes.lift_grouped_mm import lift_grouped_mm
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import arg, ops
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn
from tests.passes.blocks import (
    ACTIVATIONS,
    BLOCKS,
    NEAR_MISSES,
    Block,
    D,
    is_gated,
    operands,
    with_weights_in_float32,
)
from tests.passes.post_grad import Compiled, text

pytestmark = pytest.mark.slow  # half a second for each of many graphs
LIFTS = {"grouped": lift_grouped_mm, "batched": lift_batched_mm, "summed": lift_batched_mm}
STAGES = [
    ops.dispatch.default, ops.expert_gemm.default, ops.activate.default, ops.expert_gemm.default,
    ops.combine.default,
]  # fmt: skip
TOL = {
    torch.float32: Tol(1e-5, "float32 sums in another order"),
    torch.bfloat16: Tol(2e-2, "one more or one less rounding to 8 bits of mantissa"),
}
DEFAULTS = {"kind": "silu", "interleaved": False, "alpha": 1.0, "limit": None, "up_shift": 0.0}
each_form = pytest.mark.parametrize("form", LIFTS)


class Hook:
    """A lift, and what it said."""

    def __init__(self, form: str) -> None:
        self.lift, self.context, self.count = LIFTS[form], Context(), 0

    def __call__(self, graph: fx.Graph) -> None:
        before = text(graph)
        self.count += self.lift(graph, self.context)
        if not self.count:
            assert text(graph) == before, "a refusal changed the graph"
        graph.eliminate_dead_code()
        assert self.lift(graph, Context()) == 0, "the pass is not idempotent"


def calls(graph: fx.Graph) -> list[object]:
    """The targets of all our ops in a graph."""
    return [n.target for n in graph.nodes if getattr(n.target, "namespace", "") == "moe_ops"]


def needs_bfloat16(form: str, dtype: torch.dtype) -> None:
    if form == "grouped" and dtype is not torch.bfloat16:
        pytest.skip("torch compiles grouped products in bfloat16 alone")


# One pass lifts the last two forms: which layers of both are tested always, by form and dtype.
ALWAYS = {
    ("batched", torch.float32): (
        "clamped",
        "gelu",
        "relu2",
        "silu",
        "transposed_bias",
        "ungated_silu",
        "bias",
    ),
    ("batched", torch.bfloat16): ("plain", "in_float32", "gpt_oss"),
    ("summed", torch.float32): ("plain", "transposed", "gpt_oss", "ungated_bias"),
    ("summed", torch.bfloat16): (),
}


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        pytest.param(n, f, d, marks=[] if n in ALWAYS.get((f, d), BLOCKS) else [pytest.mark.every])
        for n in BLOCKS
        for f in LIFTS
        for d in TOL
    ],
    ids=str,
)
def test_a_layer_becomes_its_stages(name: str, form: str, dtype: torch.dtype) -> None:
    needs_bfloat16(form, dtype)
    block, gated = BLOCKS[name], is_gated(name)
    run, hook = getattr(block, form), Hook(form)
    compiled = Compiled(run, hook)
    given = operands(block, 5, dtype, gated=gated)
    got = compiled(*given)
    assert hook.count == 1, hook.context.refusals
    (graph,) = compiled.graphs
    assert calls(graph) == STAGES
    assert [n for n in graph.nodes if n.op == "call_function" and n.target not in STAGES
            and "getitem" not in n.name] == []  # fmt: skip
    activate = next(n for n in graph.nodes if n.target is ops.activate.default)
    want = DEFAULTS | {"gated": gated} | ACTIVATIONS.get(name, (None, {}))[1]
    assert {key: arg(activate, key) for key in want} == want
    exact = run(*(t.float() if t.is_floating_point() and form != "grouped" else t for t in given))
    assert_close(got, exact, TOL[dtype], name)


@each_form
def test_float32_weights_of_a_bfloat16_layer_stay_float32(form: str) -> None:
    hook = Hook(form)
    given = with_weights_in_float32(operands(Block(), 5, torch.bfloat16))
    run = getattr(Block(), form)
    assert_close(Compiled(run, hook)(*given), run(*given), TOL[torch.bfloat16])
    assert hook.count == 1


class WithWeights(nn.Module):
    """A layer that holds its weights, whose sizes are then not dynamic."""

    def __init__(self, run: Callable[..., Tensor], weights: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.run, self.weights = run, nn.ParameterList(weights)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.run(x, weights, ids, *self.weights)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its Dynamo cannot trace WithWeights")
@each_form
def test_one_graph_for_all_token_counts(form: str) -> None:
    hook = Hook(form)
    run, weights = getattr(Block(bias=True), form), operands(Block(), 5, torch.bfloat16)[3:]
    compiled = Compiled(WithWeights(run, weights), hook, dynamic=True)
    for T in (5, 9, 3):
        given = operands(Block(), T, torch.bfloat16)[:3]
        assert_close(compiled(*given), run(*given, *weights), TOL[torch.bfloat16], f"{T} tokens")
    assert hook.count == 1
    assert len(compiled.graphs) == 1


@in_turn(each_form, pytest.mark.parametrize("T", [0, 1]))
def test_no_token_and_one(T: int, form: str) -> None:
    hook = Hook(form)
    run = getattr(Block(), form)
    given = operands(Block(), T, torch.bfloat16)
    assert_close(Compiled(run, hook)(*given), run(*given), TOL[torch.bfloat16])
    assert hook.count == 1


OF_SUMS = ("sum_over_tokens", "other_weights", "scaled_rows", "rows_are_returned")


def misses() -> Iterator[Any]:
    """Each in one of the first two forms, which take turns; sums in the third, too."""
    for i, (name, (_, forms, _)) in enumerate(NEAR_MISSES.items()):
        others = [form for form in forms if form != "summed"]
        tried = {others[i % len(others)], *["summed"] * (name in OF_SUMS)}
        for form in forms:
            marks = [] if form in tried else [pytest.mark.every]
            yield pytest.param(name, form, marks=marks)


@pytest.mark.parametrize(("name", "form"), [*misses()])
def test_a_near_miss_is_left_alone_for_its_reason(name: str, form: str) -> None:
    block, _, reason = NEAR_MISSES[name]
    hook = Hook(form)
    Compiled(getattr(block, form), hook)(*operands(block, 5, torch.bfloat16))
    assert hook.count == 0
    (refusal,) = hook.context.refusals
    assert reason in refusal.text, refusal.text


def test_two_layers_are_lifted_and_a_third_left() -> None:
    def model(x: Tensor, *rest: Tensor) -> Tensor:
        for block in (Block(), NEAR_MISSES["half"][0], Block()):
            x = x + block.grouped(x, *rest)
        return x

    hook = Hook("grouped")
    given = operands(Block(), 5, torch.bfloat16)
    assert_close(Compiled(model, hook)(*given), model(*given), TOL[torch.bfloat16])
    assert hook.count == 2
    assert len(hook.context.refusals) == 1


def test_products_that_do_not_come_in_pairs() -> None:
    def three(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        for _ in range(3):
            x = torch._grouped_mm(x, w, offs=ends)
        return x

    hook = Hook("grouped")
    x, w = torch.randn(8, D).bfloat16(), torch.randn(2, D, D).bfloat16()
    Compiled(three, hook)(x, w, torch.tensor([3, 8], dtype=torch.int32))
    assert hook.context.refusals[0].text == "3 products share their offsets, not two"


def lifted(form: str, block: Block) -> str:
    compiled = Compiled(getattr(block, form), Hook(form))
    compiled(*operands(block, 5, torch.bfloat16))
    return text(compiled.graphs[0])


def test_golden() -> None:
    assert_expected_inline(
        lifted("grouped", Block(bias=True)),
        """\
arg0_1: int64[5, 2]
arg1_1: bfloat16[5, 16]
arg2_1: bfloat16[4, 16, 16]
arg3_1: bfloat16[4, 16]
arg4_1: bfloat16[4, 16, 8]
arg5_1: bfloat16[4, 16]
arg6_1: bfloat16[5, 2]
dispatch_default = moe_ops.dispatch(arg1_1, arg0_1, 4)
getitem_8 = getitem(dispatch_default, 0)  # bfloat16[10, 16]
getitem_9 = getitem(dispatch_default, 1)  # int32[10]
getitem_10 = getitem(dispatch_default, 2)  # int32[4]
expert_gemm_default = moe_ops.expert_gemm(getitem_8, arg2_1, getitem_10, bias_EF=arg3_1)  # bfloat16[10, 16]
activate_default = moe_ops.activate(expert_gemm_default)  # bfloat16[10, 8]
expert_gemm_default_1 = moe_ops.expert_gemm(activate_default, arg4_1, getitem_10, bias_EF=arg5_1)  # bfloat16[10, 16]
combine_default = moe_ops.combine(expert_gemm_default_1, arg6_1, getitem_9)  # bfloat16[5, 16]
return [combine_default]""",  # noqa: E501
    )


def test_all_forms_become_the_same_graph() -> None:
    graphs = [lifted(form, Block(bias=True)) for form in LIFTS]
    names = [re.sub(r"getitem_\d+", "output", graph) for graph in graphs]
    assert names[0] == names[1] == names[2]


@each_form
def test_stages_become_experts(form: str) -> None:
    class Fuse(Hook):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            assert fuse_experts(graph, self.context) == 1
            assert fuse_experts(graph, self.context) == 0

    block, hook = BLOCKS["gpt_oss"], Fuse(form)
    given = operands(block, 5, torch.bfloat16)
    compiled = Compiled(getattr(block, form), hook)
    assert_close(compiled(*given), getattr(block, form)(*given), TOL[torch.bfloat16])
    compiled.graphs[0].eliminate_dead_code()
    assert calls(compiled.graphs[0]) == [ops.experts.default]
