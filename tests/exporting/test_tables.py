"""`decompositions`: each op in the operators of a target gives what its definition gives."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops import OPS
from moe_ops.checks.shapes import FLOATS
from moe_ops.conformance.samples import INPUT_FORMATS, Sample, samples, specified
from moe_ops.exporting import products
from moe_ops.exporting.tables import OF_TRAINING, OVER_RANKS, PORTABLE, TARGETS
from moe_ops.hf.linears import made_of
from moe_ops.registry.spec import DECODE_OPS, NAMESPACE
from moe_ops.testing import CASES, TOL, Case, Tol, assert_close, make_layer
from tests.chosen import in_turn, one_in

aten = torch.ops.aten
F32 = torch.float32
CASE = {case.name: case for case in CASES}
REFUSED = (*OVER_RANKS, *OF_TRAINING, "experts_adapted")
LOCAL = [n for n, op in OPS.items() if n not in REFUSED and not op.arguments.mutated]
# What torch.onnx, OpenVINO, ExecuTorch or TVM have not.
LACKED = frozenset({
    aten.sort.stable, aten.searchsorted.Tensor, aten.view.dtype, aten.floor_divide.default,
    aten.remainder.Scalar, aten.repeat_interleave.self_int, aten.__rshift__.Scalar,
    aten.__lshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar, operator.mod,
    operator.floordiv,
})  # fmt: skip
# In `make test`; of `every` the others, which are further formats and strides.
QUICK = {
    "route": ("groups_top2sum_zero",), "quantize": ("int8:row",), "activate": ("gpt_oss",),
    "dispatch": ("plain", "map_and_holes"), "combine": ("holes",), "expert_loads": ("holes",),
    "expert_gemm": ("tail", "transposed", "uint4:1x16_", "mxfp4_"),
    "experts": ("bias", "gpt_oss", "map_and_holes", "int8:row_int8:row"),
    "moe": ("plain",), "route_replaying": ("plain",),
    "experts_batched": ("bias", "int8:row_int8:row"),
}  # fmt: skip
BOTH = ("experts", "experts_batched")  # of whose products inputs may be rounded
EXACT = Tol(0.0, "integers")


def sample_of(name: str, case: str, label: str) -> Sample:
    return next(s for s in samples(name, CASE[case], F32) if s.name == label)


def calls(case: str) -> list[Any]:
    """Every call of every op that runs in one process."""
    found = []
    for name in LOCAL:
        for sample in samples(name, CASE[case], F32):
            is_quick = case == "odd" and sample.name in QUICK[name]
            marks = [] if is_quick else [pytest.mark.every]
            found.append(pytest.param(name, case, sample.name, marks=marks))
    return found


def traced(name: str, args: tuple[Any, ...], target: str, **options: bool) -> fx.GraphModule:
    """The graph of a call by a table; its inputs are the tensors among the arguments."""

    def call(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return OPS[name].overload(*(next(left) if isinstance(a, Tensor) else a for a in args))

    table = moe_ops.decompositions(target, **options)
    return make_fx(call, table, tracing_mode="fake")(*tensors_of(args))


def tensors_of(args: tuple[Any, ...]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor)]


def targets_in(graph: fx.GraphModule) -> set[Any]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def hold(name: str, args: tuple[Any, ...], graph: fx.GraphModule) -> None:
    """Compare what a graph gives with the definition."""
    ours = [t for t in targets_in(graph) if str(t).startswith(f"{NAMESPACE}.")]
    assert not ours
    got, want = graph(*tensors_of(args)), OPS[name].reference(*args)
    given = zip(specified(name, args, got), specified(name, args, want), strict=True)
    # Between the products rounding may be to another code.
    rounded = next((a for a in args if a in INPUT_FORMATS), None) if name in BOTH else None
    for i, (g, w) in enumerate(given):
        tol = TOL[name, F32] if g.dtype in FLOATS else EXACT
        if rounded is not None:
            tol = TOL["experts", torch.int8 if "int8" in rounded else torch.float8_e4m3fn]
        assert_close(g.float(), w.float(), tol, f"result {i}")


@one_in(2, pytest.mark.parametrize(("name", "case", "label"), [*calls("odd"), *calls("one_token")]))
def test_portable_gives_what_the_definition_gives(name: str, case: str, label: str) -> None:
    args = sample_of(name, case, label).args
    try:
        graph = traced(name, args, "portable")
    except NotImplementedError as error:
        assert refused(args), error
        pytest.skip(str(error))
    lacked = targets_in(graph) & LACKED
    assert not lacked
    hold(name, args, graph)


@pytest.mark.parametrize("target", ["portable", "onnx", "aten"])
@pytest.mark.parametrize(
    "format", ["uint4:1x32", "float8_e4m3fn:128x128", "mxfp6_e2m3", "nvfp4", "nf4"]
)
def test_linear_layers_in_codes(format: str, target: str) -> None:
    linear = torch.nn.Linear(64, 20).requires_grad_(False)
    module = made_of(linear, format)
    module.round_from(linear.weight, "floor")
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(module, (torch.randn(3, 64),), dynamic_shapes=({0: rows},))
    graph = program.run_decompositions(moe_ops.decompositions(target)).module()
    found = targets_in(graph)
    assert not [t for t in found if str(t).startswith(f"{NAMESPACE}.")]
    assert target == "aten" or not found & LACKED
    x = torch.randn(7, 64)
    assert_close(graph(x), module(x), TOL["expert_gemm", F32])


def test_blocks_are_refused_by_name() -> None:
    linear = torch.nn.Linear(256, 4).requires_grad_(False)
    module = made_of(linear, "q4_k")
    module.round_from(linear.weight, "floor")
    program = torch.export.export(module, (torch.randn(3, 256),))
    with pytest.raises(NotImplementedError, match="blocks of q4_k hold their scales"):
        program.run_decompositions(moe_ops.decompositions("portable"))


def refused(args: tuple[Any, ...]) -> bool:
    """Whether inputs are rounded to what "portable" does not make."""
    formats = [a for a in args if a in INPUT_FORMATS and a != "int8:row"]
    return bool(formats)


@pytest.mark.parametrize(
    ("name", "label"),
    [("dispatch", "holes"), ("experts", "bias"),
     pytest.param("moe", "plain", marks=pytest.mark.every),
     pytest.param("experts", "int8:row_int8:row", marks=pytest.mark.every)],
)  # fmt: skip
@pytest.mark.parametrize("target", ["portable", pytest.param("aten", marks=pytest.mark.every)])
def test_no_tokens_and_many_rows(target: str, name: str, label: str) -> None:
    for case in ("no_tokens", "many_rows"):
        args = sample_of(name, case, label).args
        hold(name, args, traced(name, args, target))


@pytest.mark.parametrize("name", [*LOCAL, *OF_TRAINING, "experts_adapted"])
def test_aten_is_the_definition(name: str) -> None:
    for sample in samples(name, CASE["odd"], F32)[:1]:
        hold(name, sample.args, traced(name, sample.args, "aten"))


class Stages(torch.nn.Module):
    """A layer by its stages, and by one op: both results."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        layer = make_layer(case)
        self.K, self.w13, self.w2 = case.K, layer.w13_EFD, layer.w2_EDI

    def forward(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = moe_ops.route(logits, self.K)
        rows_x, rows, ends = moe_ops.dispatch(x, ids, self.w13.shape[0])
        h = moe_ops.activate(moe_ops.expert_gemm(rows_x, self.w13, ends))
        out = moe_ops.combine(moe_ops.expert_gemm(h, self.w2, ends), weights, rows)
        return out, moe_ops.moe(x, logits, self.w13, self.w2, self.K)


@pytest.mark.parametrize("target", ["portable", pytest.param("aten", marks=pytest.mark.every)])
def test_a_program_of_stages_serves_any_number_of_tokens(target: str) -> None:
    case = CASE["plain"]
    layer, tokens = make_layer(case), torch.export.Dim("tokens", max=1024)
    given = (layer.x_TD, layer.logits_TE)
    program = torch.export.export(Stages(case), given, dynamic_shapes=({0: tokens},) * 2)
    program = program.run_decompositions(moe_ops.decompositions(target))
    found = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert not [t for t in found if str(t).startswith(f"{NAMESPACE}.")]
    assert target == "aten" or not found & LACKED
    run = program.module()
    for T in (case.T, 5, 70):
        x, logits = torch.randn(T, case.D), torch.randn(T, case.E)
        for got, want in zip(run(x, logits), Stages(case)(x, logits), strict=True):
            assert_close(got, want, TOL["moe", F32], f"{T} tokens")


def largest(graph: fx.GraphModule) -> int:
    """The most values that a node has which is no input of the graph, or a view of one."""
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "call_function"]
    inputs = {n.meta["val"].untyped_storage() for n in graph.graph.nodes if n.op == "placeholder"}
    made = [v for v in values if isinstance(v, Tensor) and v.untyped_storage() not in inputs]
    return max(v.numel() for v in made)


@in_turn(
    pytest.mark.parametrize("target", ["portable", "onnx"]),
    pytest.mark.parametrize(
        ("name", "label"), [("expert_gemm", "plain"), ("experts", "silu"), ("moe", "plain")]
    ),
)
def test_many_rows_have_no_weight_each(name: str, label: str, target: str) -> None:
    case, args = CASE["many_rows"], sample_of(name, "many_rows", label).args
    rows, weight = case.T * case.K, 2 * case.I * case.D
    assert largest(traced(name, args, target)) <= max(weight, rows * 2 * case.I)
    assert largest(traced(name, args, "aten")) >= rows * weight


def test_few_rows_gather_no_more_weights_than_there_are() -> None:
    few, many = CASE["one_token"], Case(name="more", T=6, E=4, K=2, D=32, I=16)
    for case, gathers in ((few, True), (many, False)):
        layer = make_layer(case)
        args = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
        assert (aten.bmm.default in targets_in(traced("experts", args, "portable"))) is gathers


def test_an_expert_that_is_not_asked_spoils_nothing() -> None:
    args = list(sample_of("experts", "odd", "one_expert").args)
    args[3] = args[3].clone()
    args[3][0] = float("inf")
    hold("experts", tuple(args), traced("experts", tuple(args), "portable"))


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bias(call: Any) -> Tensor:
        call.b2_ED = None
        return products.experts(call)

    monkeypatch.setitem(PORTABLE, "experts", without_bias)
    args = sample_of("experts", "odd", "bias").args
    with pytest.raises(AssertionError, match="result 0: off by"):
        hold("experts", args, traced("experts", args, "portable"))


@pytest.mark.parametrize(
    ("target", "options", "error", "said"),
    [
        ("onx", {}, ValueError, "choose one of aten, portable, onnx, ort; did you mean 'onnx'"),
        (3, {}, TypeError, "target must be a str, got"),
        ("ort", {"assume_positive": 1}, TypeError, "assume_positive must be True or False"),
        ("onnx", {"assume_positive": True}, ValueError, "is for the target 'ort', got 'onnx'"),
    ],
    ids=["unknown", "no_text", "no_flag", "another_target"],
)
def test_wrong_targets(target: Any, options: Any, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        moe_ops.decompositions(target, **options)


@pytest.mark.parametrize(
    ("name", "label", "said"),
    [
        ("quantize", "mxfp4", "moe_ops.quantize: format='mxfp4' rounds to codes"),
        ("experts", "nvfp4_nvfp4", "moe_ops.experts: x_format='nvfp4' rounds to codes"),
        ("experts", "fp8_by_expert", r"moe_ops.experts: x_scale=\(5,\) has a scale for each"),
        ("experts", "float8_e4m3fn:tensor_float8_e4m3fn:tensor", "give a static h_scale"),
    ],
)
def test_what_portable_cannot_say(name: str, label: str, said: str) -> None:
    args = sample_of(name, "odd", label).args
    with pytest.raises(NotImplementedError, match=said) as caught:
        traced(name, args, "portable")
    assert "decompositions('aten')" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [(OVER_RANKS, ": .*other ranks"), (OF_TRAINING, " is a part of gradients"),
     (("experts_adapted",), " .*; merge the adapter into the weights")],
)  # fmt: skip
def test_ops_that_send_rows_train_or_adapt_are_refused(names: tuple[str, ...], said: str) -> None:
    table = moe_ops.decompositions("portable")
    for name in names:
        call = next(iter(samples(name, CASE["odd"], F32)))
        with pytest.raises(NotImplementedError, match=f"moe_ops.{name}{said}"):
            table[OPS[name].overload](*call.args)


def test_a_table_has_every_op_but_those_that_write_their_arguments() -> None:
    every = OPS | DECODE_OPS
    for target in TARGETS:
        table = moe_ops.decompositions(target)
        left = {name for name, op in every.items() if op.overload not in table}
        assert left == {name for name, op in every.items() if op.arguments.mutated}
