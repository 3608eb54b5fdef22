"""A call in float64 runs by the definition, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import MoELayer, using
from moe_ops.decode_ops import one_query
from moe_ops.ops.experts import ExpertsCall
from moe_ops.planning.choose import Node, Rules, choose
from moe_ops.registry.spec import DECODE_OPS, OPS, REFERENCE, Op
from moe_ops.testing import BF16, F32
from tests.ops.doubles import (
    EVERY,
    WITH_GRADIENTS,
    calls,
    coded,
    double,
    first_of,
    floats,
    is_float,
)  # fmt: skip

each_op = pytest.mark.parametrize("name", WITH_GRADIENTS)
each_stage = pytest.mark.parametrize("name", [n for n in WITH_GRADIENTS if n in OPS])
SAID = "takes no float64, which the definition alone computes"
NO_RULES = Rules(thresholds=None, strict=False, table={})


def copies(args: list[Any]) -> list[Any]:
    """Arguments that an op may write to."""
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


@each_op
def test_the_result_is_the_definitions_in_float64(name: str) -> None:
    op = EVERY[name]
    for args in calls(name).values():
        got, want = op(*copies(args)), op.reference(*copies(args))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert {t.dtype for t in floats(got)} <= {torch.float64}
        half = op.reference(*double(copies(args), torch.float32))
        for g, h in zip(floats(got), floats(half), strict=True):
            used = g.isfinite() & h.isfinite()
            torch.testing.assert_close(h.double()[used], g[used], rtol=1e-4, atol=1e-4)


@each_op
def test_no_other_backend_is_picked_or_forced(name: str) -> None:
    op, args = EVERY[name], first_of(EVERY[name])
    refusals = op.refusals(*args)
    assert op.pick(op.call(*args)).name == REFERENCE and refusals.pop(REFERENCE) is None
    assert all((reason or "").startswith(SAID) for reason in refusals.values())
    with using(REFERENCE, name):
        op(*copies(args))
    for backend in (*refusals, *op.paths):
        with using(backend, name), pytest.raises(NotImplementedError, match=SAID):
            op(*args)


@each_op
def test_the_schema_and_the_fake_are_true(name: str) -> None:
    args = tuple(copies(first_of(EVERY[name])))
    tests = ("test_schema", "test_faketensor")
    report = torch.library.opcheck(EVERY[name].overload, args, test_utils=tests)
    assert set(report.values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.every
@each_stage
def test_compilers_trace_it_with_gradients(name: str) -> None:
    args = first_of(OPS[name])
    trained = tuple(a.clone().requires_grad_() if is_float(a) else a for a in args)
    tests = ("test_aot_dispatch_dynamic",)
    report = torch.library.opcheck(OPS[name].overload, trained, test_utils=tests)
    assert set(report.values()) == {"SUCCESS"}


@each_op
def test_meta_tensors_have_the_shapes_and_dtypes(name: str) -> None:
    op, args = EVERY[name], first_of(EVERY[name])

    def on_meta(value: Any) -> Any:
        if isinstance(value, list):
            return [on_meta(v) for v in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    for got, want in zip(floats(op(*on_meta(args))), floats(op(*copies(args))), strict=True):
        assert (got.shape, got.dtype, got.is_meta) == (want.shape, want.dtype, True)


@each_stage
def test_a_graph_has_the_definition(name: str) -> None:
    op = OPS[name]
    call, place = op.call(*first_of(op)), Node(name="node", layer="")
    choice = choose(op, call, place, NO_RULES)
    assert choice.backends == (REFERENCE,)
    assert all(reason.startswith(SAID) for reason in choice.refusals.values())


def test_thresholds_cannot_give_it_to_a_backend() -> None:
    call, place = OPS["experts"].call(*first_of(OPS["experts"])), Node(name="node", layer="")
    rules = Rules(thresholds=((None, "cpu"),), strict=False, table={})
    with pytest.raises(ValueError, match=f"thresholds give .* to 'cpu', but: {SAID}"):
        choose(OPS["experts"], call, place, rules)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    """`experts` with a backend from outside that runs whatever it is given, and remembers it."""
    op = OPS["experts"]
    for name, value in (("_backends", dict(op.backends)), ("_order", {}), ("_plans", {})):
        monkeypatch.setattr(op, name, value)

    def run(call: ExpertsCall) -> Tensor:
        return torch.full_like(call.x_TD, 7.0)

    op.backend("greedy", reads=op.optional, priority=99)(run)
    for name in op.backends:
        if name != REFERENCE:
            op.remembers(name)
    yield op
    op.memo.clear()


def test_a_backend_from_outside_gets_none(greedy: Op) -> None:
    args = first_of(greedy)
    single = double(args, torch.float32)
    want = greedy.reference(*args)
    for _ in range(4):  # from the third on they are remembered
        assert greedy(*single).eq(7.0).all()
        assert torch.equal(greedy(*args), want)
    assert greedy.planned(*single, plan="greedy").eq(7.0).all()
    assert torch.equal(greedy.planned(*args, plan="greedy"), want)
    with using("greedy"), pytest.raises(NotImplementedError, match=SAID):
        greedy(*args)


@each_op
def test_a_mixture_with_other_floats_is_refused(name: str) -> None:
    op = EVERY[name]
    # Ops of a step have one error for all that is wrong, but for what `experts` says.
    error = TypeError if name in OPS else (TypeError, ValueError)
    other = BF16 if name in ("linears", "normed_linears", "rope_attention") else F32
    tried = 0
    for args in calls(name).values():
        places = [i for i, a in enumerate(args) if is_float(a)]
        if len(places) < 2:
            continue
        for others, odd in ((args, other), (double(args, other), torch.float64)):
            for i in places:
                mixed = [double(a, odd) if j == i else a for j, a in enumerate(others)]
                with pytest.raises(error, match="float64"):
                    op.check(op.call(*mixed))
                tried += 1
    assert tried or name in ("activate", "dispatch", "combine_tokens", "sum_ranks")


@pytest.mark.parametrize("name", ["expert_gemm", "experts", "moe", "experts_over_ranks"])
def test_weights_in_codes_are_refused(name: str) -> None:
    found = coded(name)
    assert found
    for args in found.values():
        args = [a.double() if isinstance(a, Tensor) and a.shape[:1] == args[0].shape[:1]
                and a.dtype is torch.float32 and a.dim() == 2 else a for a in args]  # fmt: skip
        with pytest.raises(TypeError, match=r"x_.D must be .*; quantised weights take no float64"):
            OPS[name](*args)


def test_codes_take_no_float64() -> None:
    x, ids = torch.zeros(3, 4, dtype=torch.int8), torch.zeros(3, 2, dtype=torch.int32)
    weights, scale = torch.ones(3, 2, dtype=torch.float64), torch.ones(3, 1)
    table = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="weights_TK must be one of float32, bfloat16, float16"):
        moe_ops.dispatch_tokens(x, weights, ids, table, table, 3, scale_TS=scale)
    with pytest.raises(TypeError, match="tokens with scales take no float64"):
        moe_ops.dispatch_tokens(x.double(), weights, ids, table, table, 3, scale_TS=scale)
    with pytest.raises(TypeError, match="x_RD must be one of float32, bfloat16, float16; got fl"):
        moe_ops.quantize(x.double())


def test_routing_weights_are_rounded_where_that_is_asked_for() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64)
    assert moe_ops.route(logits, 2)[0].dtype is torch.float64
    assert moe_ops.route(logits, 2, out_dtype="bfloat16")[0].dtype is torch.bfloat16
    x, *rest = first_of(OPS["moe"])
    named = {**OPS["moe"].arguments.by_name(OPS["moe"].call(x, *rest)), "weights_dtype": "bfloat16"}
    with pytest.raises(TypeError, match="weights_dtype='bfloat16' would round the weights of fl"):
        moe_ops.moe(**named)


def test_a_mask_of_floats_is_in_float64_too() -> None:
    q, k, v, mask, scale, *_ = first_of(DECODE_OPS["one_query"])
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -float("inf"))
    want = one_query(q, k, v, mask, scale)
    torch.testing.assert_close(one_query(q, k, v, added, scale), want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"the mask is torch\.float32, the query torch.float64"):
        one_query(q, k, v, added.float(), scale)


def test_a_layer_in_float64_trains() -> None:
    torch.manual_seed(0)
    layer = MoELayer(
        3, 2, 4, 3, bias=True, shared_experts=1, dtype=torch.float64,
        routing=moe_ops.Routing(score="sigmoid", correction_bias=True, renormalize=True),
    )  # fmt: skip
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    for parameter in layer.parameters():
        parameter.data.normal_()
    x, logits = (torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (4, 3))
    assert torch.autograd.gradcheck(layer, (x, logits), fast_mode=True)


@pytest.mark.slow
def test_what_is_compiled_is_the_definition() -> None:
    torch._dynamo.reset()
    args = first_of(OPS["experts"])
    with torch.no_grad():
        got = torch.compile(moe_ops.experts, options=moe_ops.inductor_options())(*args)
    torch.testing.assert_close(got, OPS["experts"].reference(*args), rtol=0, atol=1e-12)
