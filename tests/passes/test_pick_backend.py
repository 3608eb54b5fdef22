"""`pick_backend`: which backend is baked in, for which numbers of rows, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from moe_ops import using
from moe_ops.backends import cpu
from moe_ops.ops import expert_gemm, experts, route
from moe_ops.ops.experts import ExpertsCall
from moe_ops.passes.inductor.pipeline import Pipeline
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.passes.rewriting.context import Context, Options
from moe_ops.planning.choose import bounds
from moe_ops.planning.plan import Choice
from moe_ops.planning.thresholds import check_thresholds
from moe_ops.registry.backend import Rows
from moe_ops.registry.ranges import Ranges, parse_plan
from moe_ops.testing import BF16, CASES, F16, F32, TOL, Case, assert_close, make_layer
from tests.passes.planned import PLAIN, Hook, any_rows, call_of, experts_call, plans, run_experts
from tests.passes.post_grad import Compiled, text

MANY = Case(name="many", T=300, E=4, K=2, D=32, I=16)


def only_choice(hook: Hook) -> Choice:
    (choice,) = hook.context.choices
    return choice


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_results_are_those_of_eager_mode(dtype: torch.dtype, dynamic: bool) -> None:
    hook = Hook(pick_backend)
    got, _ = run_experts(hook, dynamic=dynamic, dtype=dtype)
    assert_close(got, experts(*experts_call(dtype=dtype)), TOL["experts", dtype])
    assert hook.counts == [1]
    assert hook.guards == 0


def test_golden_with_a_known_number_of_tokens() -> None:
    _, graph = run_experts(Hook(pick_backend))
    assert_expected_inline(
        text(graph),
        """\
arg0_1: float32[16, 64]
arg1_1: float32[16, 2]
arg2_1: int32[16, 2]
arg3_1: float32[8, 64, 64]
arg4_1: float32[8, 64, 32]
experts_planned = moe_ops.experts.planned(arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, plan=cpu)  # float32[16, 64]
return [experts_planned]""",  # noqa: E501
    )


def test_golden_with_any_number_of_tokens() -> None:
    _, graph = run_experts(Hook(pick_backend), dynamic=True)
    assert_expected_inline(
        text(graph),
        """\
arg0_1: s26
arg1_1: float32[s26, 64]
arg2_1: float32[s26, 2]
arg3_1: int32[s26, 2]
arg4_1: float32[8, 64, 64]
arg5_1: float32[8, 64, 32]
experts_planned = moe_ops.experts.planned(arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, plan=128:cpu,:aten)  # float32[s26, 64]
return [experts_planned]""",  # noqa: E501
    )


def test_what_was_decided_is_recorded() -> None:
    hook = Hook(pick_backend)
    run_experts(hook, dynamic=True, dtype=BF16)
    choice = only_choice(hook)
    assert choice.shapes == {"D": 64, "K": 2, "E": 8, "F": 64, "I": 32}
    assert (choice.op, choice.dtype, choice.format) == ("experts", "bfloat16", "")
    assert choice.rows == (2, None)
    assert choice.candidates == ("cpu", "aten", "reference")
    assert choice.refusals == {}
    first, last = choice.ranges
    assert (first.upto, first.backend, first.source) == (40, "cpu", "limit")
    assert (last.upto, last.backend, last.source) == (None, "aten", "limit")
    assert first.at == 40
    assert first.predicted_us is not None
    assert first.predicted_us > 5
    assert last.at is last.predicted_us is None, "no number of rows to predict"
    assert [note.text for note in hook.context.rewrites] == ["experts: 40:cpu,:aten"]


def test_who_emulates_inputs_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_backends", dict(experts.backends))
    monkeypatch.setattr(experts, "_order", {})
    experts.emulates("cpu", lambda call: call.kind == "silu")
    hook = Hook(pick_backend)
    run_experts(hook, dynamic=True, dtype=BF16)
    assert only_choice(hook).emulated == ("cpu",)


def test_a_backend_that_is_the_better_one_for_any_number_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cpu.EXPERTS_MAX_ROWS, BF16, None)
    hook = Hook(pick_backend)
    run_experts(hook, dynamic=True, dtype=BF16)
    (only,) = only_choice(hook).ranges
    assert (only.upto, only.backend) == (None, "cpu")


def test_one_graph_runs_both_sides_of_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, tensors = call_of(experts, experts_call(dtype=BF16), Hook(pick_backend))
    any_rows(tensors[:3])
    compiled(*tensors)
    ran: list[str] = []
    for T, want in ((40, "cpu"), (41, "aten"), (300, "aten")):
        layer = make_layer(replace(PLAIN, T=T), BF16)
        args = (layer.x_TD, layer.weights_TK, layer.ids_TK, *tensors[3:])
        eager = experts(*args)
        with monkeypatch.context() as patch:
            patch.setitem(experts._plans, "40:cpu,:aten", recorded("40:cpu,:aten", ran))
            assert_close(compiled(*args), eager, TOL["experts", BF16])
        assert ran.pop() == want
    assert len(compiled.graphs) == 1, "another number of tokens made another graph"


def recorded(plan: str, ran: list[str]) -> Any:
    """The functions of a plan, which add their backend's name to a list."""

    def run(name: str, *args: Any) -> Any:
        ran.append(name)
        return experts.backends[name].run(*args)

    return tuple((upto, partial(run, name), name) for upto, name in parse_plan(plan))


def test_using_does_not_reach_into_a_graph() -> None:
    compiled, tensors = call_of(experts, experts_call(), Hook(pick_backend))
    want = compiled(*tensors)
    with using("reference"):
        assert torch.equal(compiled(*tensors), want)


def test_with_a_known_number_the_better_backend_is_taken() -> None:
    for T, want in ((20, "cpu"), (21, "reference")):
        hook = Hook(pick_backend)
        run_experts(hook, case=replace(MANY, T=T), dtype=BF16)
        assert only_choice(hook).backends == (want,), "grouped stages are compiled, not called"


@pytest.mark.slow
def test_bounds_of_a_symbol_cut_the_plan() -> None:
    for low, high, want in ((2, 40, "cpu"), (2, 41, "40:cpu,:aten"), (41, 300, "reference")):
        hook = Hook(pick_backend)
        compiled, tensors = call_of(experts, experts_call(replace(PLAIN, T=high), BF16), hook)
        for t in tensors[:3]:
            torch._dynamo.mark_dynamic(t, 0, min=low, max=high)
        compiled(*tensors)
        assert only_choice(hook).rows == (low, high)
        assert only_choice(hook).text == want
        assert hook.guards == 0


def test_what_every_backend_refuses_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = Hook(pick_backend)
    _, graph = run_experts(hook, dtype=F16, dynamic=True)
    assert plans(graph) == ["experts -"]
    assert hook.counts == [0]
    assert only_choice(hook).refusals == {"cpu": "needs float32 or bfloat16, got torch.float16"}


def test_an_op_of_others_with_a_similar_name_is_left() -> None:
    def near_miss(y: Tensor) -> Tensor:
        return torch.ops.moe_ops.activate.planned(y, plan="reference")

    hook = Hook(pick_backend)
    Compiled(near_miss, hook)(torch.randn(4, 6))
    assert hook.counts == [0]
    assert hook.context.choices == []


def strided_experts(x: Tensor, w: Tensor, ids: Tensor, w13_EDF: Tensor, w2_EID: Tensor) -> Tensor:
    """Weights that lie transposed, and tokens and weights that come out of other computations."""
    x = (x.T.contiguous() * 2).T  # columns first
    return experts(x, w.softmax(-1), ids, w13_EDF.transpose(1, 2), w2_EID.transpose(1, 2))


def transposed_call(dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, w, ids, w13, w2 = experts_call(dtype=dtype)
    return x, w, ids, w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()


def test_backends_are_asked_about_the_strides_of_the_graph() -> None:
    hook = Hook(pick_backend)
    Compiled(strided_experts, hook)(*transposed_call(F32))
    reason = "needs weights contiguous along their last axis"
    assert only_choice(hook).refusals == {"cpu": reason}


# Thresholds


@pytest.mark.parametrize(
    ("thresholds", "want"),
    [
        (((None, "aten"),), ":aten"),
        (((8, "aten"), (None, "cpu")), "8:aten,:cpu"),
        (((1, "aten"), (None, "cpu")), ":cpu"),
        (((8, "cpu"), (64, "cpu"), (None, "cpu")), ":cpu"),
        (((8, "reference"), (None, "cpu")), "8:reference,:cpu"),
    ],
)
def test_thresholds_of_the_user_win(thresholds: Ranges, want: str) -> None:
    hook = Hook(pick_backend, thresholds=thresholds)
    got, graph = run_experts(hook, dynamic=True)
    assert plans(graph) == [f"experts {want}"]
    assert {r.source for r in only_choice(hook).ranges} == {"forced"}
    assert_close(got, experts(*experts_call()), TOL["experts", F32])


def test_thresholds_decide_for_a_known_number() -> None:
    for T, want in ((8, "aten"), (9, "cpu")):
        hook = Hook(pick_backend, thresholds=((8, "aten"), (None, "cpu")))
        _, graph = run_experts(hook, case=replace(PLAIN, T=T))
        assert plans(graph) == [f"experts {want}"]


def test_thresholds_speak_of_experts_alone() -> None:
    layer = make_layer(PLAIN)
    hook = Hook(pick_backend, thresholds=((None, "aten"),))
    compiled, tensors = call_of(route, (layer.logits_TE, 2), hook)
    compiled(*tensors)
    assert only_choice(hook).text == "cpu"


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu backend of `experts` takes at most 9 tokens."""
    found = replace(experts.backends["cpu"], rows=Rows(possible=lambda *_: 9))
    monkeypatch.setitem(experts.backends, "cpu", found)
    monkeypatch.setattr(experts, "_order", {})


@pytest.mark.parametrize(
    ("T", "want"), [(None, "9:cpu,:aten"), (9, "cpu"), (10, "aten")], ids=["any", "9", "10"]
)
def test_a_backend_is_planned_for_what_it_can_run(limited: None, T: int | None, want: str) -> None:
    hook = Hook(pick_backend)
    run_experts(hook, dynamic=T is None, case=replace(PLAIN, T=T or PLAIN.T))
    (choice,) = hook.context.choices
    got = choice.text if T != 10 else choice.candidates[0]
    assert got == want


def test_thresholds_beyond_what_a_backend_can_run_are_refused(limited: None) -> None:
    hook = Hook(pick_backend, thresholds=((16, "cpu"), (None, "aten")))
    with pytest.raises(BackendCompilerFailed, match="up to 16 tokens, but: takes at most 9 rows"):
        run_experts(hook, dynamic=True)


BAD = {
    "empty": ((), r"thresholds \(\) must be \(\(largest number of tokens, backend\)"),
    "open": (((8, "cpu"),), "and None as the last"),
    "inner_none": (((None, "cpu"), (None, "aten")), "with ascending numbers above 0"),
    "falling": (((8, "cpu"), (4, "aten"), (None, "cpu")), "with ascending numbers above 0"),
    "equal": (((8, "cpu"), (8, "aten"), (None, "cpu")), "with ascending numbers above 0"),
    "zero": (((0, "cpu"), (None, "aten")), "with ascending numbers above 0"),
    "unknown": (
        ((8, "gpu"), (None, "cpu")),
        "name gpu, but the backends of experts and moe are aten, by_row, cpu, .*reference",
    ),
}


@pytest.mark.parametrize(("thresholds", "message"), BAD.values(), ids=BAD)
def test_thresholds_are_checked(thresholds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_thresholds(thresholds)
    with pytest.raises(ValueError, match=message):
        pick_backend(torch.fx.Graph(), Context(options=Options(thresholds=thresholds)))


def test_a_backend_that_cannot_serve_its_range_is_an_error_when_compiling() -> None:
    hook = Hook(pick_backend, thresholds=((8, "aten"), (None, "cpu")))
    with pytest.raises(BackendCompilerFailed) as raised:
        run_experts(hook, dtype=F16, dynamic=True)
    assert_expected_inline(
        str(raised.value.inner_exception),
        """thresholds give moe_ops.experts (node experts) to 'cpu' for more tokens, but: needs float32 or bfloat16, got torch.float16""",  # noqa: E501
    )
    run_experts(hook, dtype=F16, case=replace(PLAIN, T=8))  # the range of cpu is not met


# Strict


def test_strict_lists_every_refusal_instead_of_the_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = make_layer(PLAIN, F16)
    ends = torch.arange(1, 9, dtype=torch.int32)
    monkeypatch.setattr(cpu.kernels, "unavailable", lambda: "needs a working C++ compiler")
    compiled, tensors = call_of(route, (layer.logits_TE, 2), Hook(pick_backend, strict=True))
    with pytest.raises(BackendCompilerFailed) as raised:
        compiled(*tensors)
    assert_expected_inline(
        str(raised.value.inner_exception),
        """\
strict: no backend runs moe_ops.route (node route)
  cpu: needs a working C++ compiler""",
    )
    hook = Hook(pick_backend, strict=True)
    compiled, tensors = call_of(expert_gemm, (layer.x_TD[:8], layer.w13_EFD, ends), hook)
    compiled(*tensors)
    assert only_choice(hook).text == "aten", "one backend is enough"


def test_strict_takes_an_op_that_has_no_backend_here() -> None:
    hook = Hook(pick_backend, strict=True)
    compiled, tensors = call_of(torch.ops.moe_ops.activate, (torch.randn(4, 6),), hook)
    compiled(*tensors)
    assert only_choice(hook).text == "reference"


# Backends that decide by a size


def test_a_backend_that_decides_by_a_symbolic_size_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def few(call: ExpertsCall) -> str | None:
        return None if call.x_TD.shape[0] <= 64 else "has few registers"

    monkeypatch.setitem(experts.backends, "cpu", replace(experts.backends["cpu"], supports=few))
    monkeypatch.setattr(experts, "_order", {})
    for dynamic, refusals in (
        (False, {}),
        (True, {"cpu": "decides by a size that is not known when compiling"}),
    ):
        hook = Hook(pick_backend)
        run_experts(hook, dynamic=dynamic)
        assert only_choice(hook).refusals == refusals
        assert hook.guards == 0
    monkeypatch.undo()
    experts._order.clear()


def test_bounds_of_sizes() -> None:
    assert bounds(7) == (7, 7)


# Through Inductor's code generation


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_planned_ops_receive_the_strides_they_were_planned_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = transposed_call(dtype)
    seen: list[tuple[int, ...]] = []

    def run(call: Any) -> Any:
        seen.extend(t.stride() for t in experts.arguments.flat(call)[:5])
        return experts.backends["aten"].run(call)

    monkeypatch.setitem(experts._plans, "aten", ((None, run, "aten"),))
    pipeline = Pipeline(Options(thresholds=((None, "aten"),)), passes=(pick_backend,))
    options = {"post_grad_custom_post_pass": pipeline, "fx_graph_cache": False}
    torch._dynamo.reset()
    with torch.inference_mode():
        got = torch.compile(strided_experts, options=options)(*args)
        want = strided_experts(*args)
    _, w, ids, w13, w2 = args
    weights = (w13.transpose(1, 2).stride(), w2.transpose(1, 2).stride())
    assert seen == [(1, 16), w.stride(), ids.stride(), *weights]
    assert_close(got, want, TOL["experts", dtype])


@pytest.mark.slow
def test_every_case_gets_a_choice() -> None:
    for case in CASES:
        hook = Hook(pick_backend)
        run_experts(hook, case=case)
        assert len(hook.context.choices) == 1
