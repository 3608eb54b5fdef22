"""`lower`: what no backend takes becomes its definition, with plans for the ops in it."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from moe_ops.backends import cpu
from moe_ops.conformance.memory import tensors
from moe_ops.conformance.samples import mutated
from moe_ops.ops import activate, combine, expert_gemm, experts, moe
from moe_ops.passes.hoist_quantize import hoist_quantize
from moe_ops.passes.inductor.pipeline import Pipeline
from moe_ops.passes.lower import lower
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.registry.spec import OPS, Op
from moe_ops.testing import BF16, F16, F32, TOL, Case, Tol, assert_close, make_layer
from tests.calls import CALLS
from tests.chosen import in_turn
from tests.passes.planned import PLAIN, Hook, any_rows, call_of, experts_call, plans, run_experts
from tests.passes.post_grad import text

pytestmark = pytest.mark.slow  # compiles many graphs

either = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def each_pair(first: torch.dtype, second: torch.dtype) -> pytest.MarkDecorator:
    """Dtypes of static sizes and of dynamic ones; in the short run each has one of them."""
    every = [
        pytest.param(dtype, dynamic, marks=pytest.mark.every)
        for dtype, dynamic in ((first, True), (second, False))
    ]
    return pytest.mark.parametrize(
        ("dtype", "dynamic"), [(first, False), (second, True), *every], ids=str
    )


CODES = Tol(0.0, "codes and copies are exact")


def run(hook: Hook, op: Op, args: tuple[Any, ...], dynamic: bool = False) -> tuple[Any, Any]:
    """The result of a rewritten call, and its graph."""
    compiled, tensors = call_of(op, args, hook)
    if dynamic:
        any_rows(tensors)
    result = compiled(*tensors)
    return result, compiled.graphs[0]


def quantized(format: str, dtype: torch.dtype, x_format: str = "") -> tuple[Any, ...]:
    """A call of `experts` with quantised weights."""
    x, w, ids, w13, w2 = experts_call(dtype=dtype)
    first, second = (packing.quantize(t, Format.of(format)) for t in (w13, w2))
    given = {
        "x_TD": x, "weights_TK": w, "ids_TK": ids, "w_format": format, "x_format": x_format,
        "w13_EFD": first.values, "w13_scale_EFG": first.scale, "w13_zero_EFG": first.zero,
        "w2_EDI": second.values, "w2_scale_EDG": second.scale, "w2_zero_EDG": second.zero,
    }  # fmt: skip
    bound = inspect.signature(experts).bind(**given)
    bound.apply_defaults()
    return bound.args


def test_golden_of_an_activation() -> None:
    hook = Hook(lower)
    y = torch.randn(4, 6, dtype=BF16)
    got, graph = run(hook, activate, (y,), dynamic=True)
    assert_close(got, activate(y), TOL["activate", BF16])
    assert hook.counts == [1]
    assert_expected_inline(
        text(graph),
        """\
arg0_1: s95
arg1_1: bfloat16[s95, 6]
convert_element_type = prims.convert_element_type(arg1_1, float32)  # float32[s95, 6]
split = aten.split.Tensor(convert_element_type, 3, -1)
getitem = getitem(split, 0)  # float32[s95, 3]
getitem_1 = getitem(split, 1)  # float32[s95, 3]
neg = aten.neg(getitem)  # float32[s95, 3]
exp = aten.exp(neg)  # float32[s95, 3]
add_3 = aten.add.Tensor(exp, 1)  # float32[s95, 3]
div = aten.div.Tensor(getitem, add_3)  # float32[s95, 3]
mul_2 = aten.mul.Tensor(div, getitem_1)  # float32[s95, 3]
convert_element_type_1 = prims.convert_element_type(mul_2, bfloat16)  # bfloat16[s95, 3]
return [convert_element_type_1]""",
    )


def test_golden_of_quantized_experts() -> None:
    hook = Hook(pick_backend, lower)
    _, graph = run(hook, experts, quantized("mxfp6_e3m2", F32), dynamic=True)
    assert_expected_inline(
        "\n".join(plans(graph)),
        """\
expert_gemm :dequantize
expert_gemm :dequantize""",
    )
    assert_expected_inline(
        "\n".join(note.text for note in hook.context.rewrites),
        """\
experts: its definition
expert_gemm: dequantize
expert_gemm: dequantize
dispatch: its definition
activate: its definition
combine: its definition""",
    )


@in_turn(each_pair(F32, BF16), pytest.mark.parametrize("name", OPS))
def test_results_are_those_of_eager_mode(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    op = OPS[name]
    kept = (*op.arguments.mutated, "scale_N")  # which are float32 whatever the layer is
    args = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() and n not in kept else a
            for n, a in zip(op.arguments.paths, CALLS[name], strict=False)]  # fmt: skip
    theirs = copy.deepcopy(args)
    hook = Hook(pick_backend, lower)
    got, graph = run(hook, op, tuple(args), dynamic)
    want = op(*theirs)
    found = [*tensors(got), *mutated(op, tuple(args))]
    for g, w in zip(found, [*tensors(want), *mutated(op, tuple(theirs))], strict=True):
        assert g.dtype == w.dtype
        assert_close(g, w, TOL.get((name, g.dtype), CODES))
    # What keeps an exchange where it is is no op with backends.
    found_plans = [plan for plan in plans(graph) if plan != "kept -"]
    assert not [plan for plan in found_plans if plan.endswith(" -")], "an op without a plan"
    assert not hook.context.refusals
    assert hook.guards == 0


def for_rows(backend: str, dynamic: bool) -> str:
    """The plan of one backend, for any number of rows if sizes are dynamic."""
    return f":{backend}" if dynamic else backend


@in_turn(
    either, pytest.mark.parametrize("format", ["mxfp6_e3m2", "float8_e5m2:16x32", "uint4:1x16"])
)
def test_quantized_experts_run_on_decoded_weights(format: str, dynamic: bool) -> None:
    args = quantized(format, BF16)
    hook = Hook(pick_backend, lower)
    got, graph = run(hook, experts, args, dynamic)
    assert_close(got, experts(*args), TOL["experts", BF16])
    assert plans(graph) == [f"expert_gemm {for_rows('dequantize', dynamic)}"] * 2
    assert hook.guards == 0


@either
def test_quantized_inputs_are_compiled(dynamic: bool) -> None:
    args = quantized("mxfp6_e3m2", BF16, "float8_e4m3fn:row")
    hook = Hook(pick_backend, lower)
    got, graph = run(hook, experts, args, dynamic)
    assert_close(got, experts(*args), TOL["experts", BF16])
    assert plans(graph) == [f"expert_gemm {for_rows('dequantize', dynamic)}"] * 2


@either
def test_scales_of_inputs_by_expert_are_compiled(dynamic: bool) -> None:
    args = list(quantized("mxfp6_e3m2", F32, "float8_e4m3fn:tensor"))
    names = list(inspect.signature(experts).parameters)
    E = args[names.index("w13_EFD")].shape[0]
    for name in ("x_scale", "h_scale"):
        args[names.index(name)] = torch.linspace(0.01, 0.03, E)
    hook = Hook(hoist_quantize, pick_backend, lower)
    got, graph = run(hook, experts, tuple(args), dynamic)
    assert_close(got, experts(*args), TOL["experts", F32])
    assert plans(graph) == [f"expert_gemm {for_rows('dequantize', dynamic)}"] * 2


@in_turn(either, pytest.mark.parametrize("x_format", ["", "int8:row"], ids=["weights", "inputs"]))
def test_what_a_kernel_takes_stays_whole(x_format: str, dynamic: bool) -> None:
    args = quantized("int8:row", BF16, x_format)
    got, graph = run(Hook(pick_backend, lower), experts, args, dynamic)
    assert torch.equal(got, experts(*args))
    assert plans(graph) == [f"experts {for_rows('cpu', dynamic)}"]


def test_moe_is_routing_and_experts_with_the_users_thresholds() -> None:
    hook = Hook(pick_backend, lower, thresholds=((8, "cpu"), (None, "aten")))
    layer = make_layer(PLAIN)
    args = (layer.x_TD, layer.logits_TE, layer.w13_EFD, layer.w2_EDI, 2)
    got, graph = run(hook, moe, args, dynamic=True)
    assert plans(graph) == ["route :cpu", "experts 8:cpu,:aten"]
    assert_close(got, moe(*args), TOL["moe", F32])
    assert [c.op for c in hook.context.choices] == ["moe", "route", "experts"]


def test_one_graph_for_any_number_of_tokens() -> None:
    compiled, tensors = call_of(experts, experts_call(dtype=F16), Hook(pick_backend, lower))
    any_rows(tensors[:3])
    compiled(*tensors)
    for T in (2, 7, 90):
        layer = make_layer(replace(PLAIN, T=T), F16)
        args = (layer.x_TD, layer.weights_TK, layer.ids_TK, *tensors[3:])
        assert_close(compiled(*args), experts(*args), TOL["experts", F16])
    assert len(compiled.graphs) == 1


def test_it_picks_by_itself() -> None:
    hook = Hook(lower)
    _, graph = run_experts(hook)
    assert plans(graph) == ["experts cpu"]
    assert hook.counts == [0], "a planned op is not lowered"


def test_new_nodes_say_where_they_come_from() -> None:
    class Mlp(torch.nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return activate(y)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, y: Tensor) -> Tensor:
            return self.mlp(y)

    hook = Hook(lower)
    compiled, _ = call_of(activate, (), hook)
    compiled.function = Model()
    compiled(torch.randn(4, 6))
    assert [c.layer for c in hook.context.choices] == ["mlp"]
    assert [note.layer for note in hook.context.rewrites] == ["mlp"]
    calls = [n for n in compiled.graphs[0].nodes if n.op == "call_function"]
    assert all("nn_module_stack" in n.meta and "val" in n.meta for n in calls)


# Definitions that are not compiled


def test_a_large_gather_stays_one_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = {n: b for n, b in expert_gemm.backends.items() if n not in ("cpu", "aten", "dequantize")}
    monkeypatch.setattr(expert_gemm, "_backends", left)
    monkeypatch.setattr(expert_gemm, "_order", {})
    monkeypatch.setattr(expert_gemm, "_plans", {})
    args = CALLS["expert_gemm"]
    for dynamic, most, want, reason in (
        (False, 2**24, [], None),
        (False, 2**16, ["expert_gemm reference"], "its definition gathers 0.25 MiB of weights"),
        (True, 2**24, ["expert_gemm reference"], "of an unknown number of rows"),
    ):
        monkeypatch.setattr(sys.modules[lower.__module__], "MOST_GATHERED", most)
        hook = Hook(pick_backend, lower)
        with caplog.at_level(logging.INFO, logger="moe_ops"):
            got, graph = run(hook, expert_gemm, args, dynamic)
        assert plans(graph) == want
        assert_close(got, expert_gemm.reference(*args), TOL["expert_gemm", F32])
        assert [reason in note.text for note in hook.context.refusals] == [True] * len(want)
        assert ("expert_gemm runs on its reference" in caplog.text) == bool(want)
    with pytest.raises(
        BackendCompilerFailed, match=r"strict: moe_ops\.expert_gemm .* stays opaque"
    ):
        run(Hook(pick_backend, lower, strict=True), expert_gemm, args, dynamic=True)


def test_a_definition_that_would_add_a_guard_stays_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = combine.reference

    def guarding(y_RD: Tensor, weights_TK: Tensor, rows_R: Tensor) -> Tensor:
        return definition(y_RD, weights_TK, rows_R) * (2 if weights_TK.shape[0] > 100 else 1)

    monkeypatch.setattr(combine, "reference", guarding)
    hook = Hook(pick_backend, lower)
    _, graph = run(hook, combine, CALLS["combine"], dynamic=False)
    assert plans(graph) == []
    hook = Hook(pick_backend, lower)
    y, weights, rows = CALLS["combine"]
    compiled, tensors = call_of(combine, (y, weights, rows), hook)
    for t in tensors:
        torch._dynamo.maybe_mark_dynamic(t, 0)
    compiled(*tensors)
    assert plans(compiled.graphs[0]) == ["combine reference"]
    assert hook.guards == 0
    (note,) = hook.context.refusals
    assert note.text.endswith("its definition decides by a size that is not known when compiling")


def test_strict_refuses_to_fall_back_to_the_definition() -> None:
    with pytest.raises(BackendCompilerFailed) as raised:
        run(Hook(pick_backend, lower, strict=True), experts, quantized("mxfp6_e3m2", F32))
    assert_expected_inline(
        str(raised.value.inner_exception),
        """\
strict: no backend runs moe_ops.experts (node experts)
  cpu: needs weights of int8, uint8, int4, uint4, float4_e2m1, float8_e4m3fn, nf4, q4_k, q5_k, q6_k, got float6_e3m2
  aten: does not read w_format='mxfp6_e3m2'""",  # noqa: E501
    )


# Through Inductor's code generation

LARGER = Case(name="larger", T=24, E=4, K=2, D=64, I=48)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [
        (F16, True),
        *(
            pytest.param(dtype, dynamic, marks=pytest.mark.every)
            for dtype, dynamic in ((BF16, False), (BF16, True), (F16, False))
        ),
    ],
    ids=str,
)
def test_generated_code_agrees_with_eager_mode(
    dtype: torch.dtype, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cpu.EXPERTS_MAX_ROWS, BF16, 1)  # the stages, each with its own choice
    pipeline = Pipeline(passes=(pick_backend, lower))
    options = {"post_grad_custom_post_pass": pipeline, "fx_graph_cache": False}
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: moe(*args, 2), options=options, fullgraph=True)
    for T in (24, 9, 50) if dynamic else (24,):
        layer = make_layer(replace(LARGER, T=T), dtype)
        args = (layer.x_TD, layer.logits_TE, layer.w13_EFD, layer.w2_EDI)
        for t in args[:2] if dynamic else ():
            torch._dynamo.mark_dynamic(t, 0)
        with torch.inference_mode():
            assert_close(compiled(*args), moe(*args, 2), TOL["moe", dtype])
    assert len(pipeline.runs) == 1
