"""Calls that have to be batch invariant, on CPUs: a row's bits are those that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import experts, quantize
from moe_ops.decode_ops import quantized_linears
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.linear_layers import apply_linear
from moe_ops.ops.route import SCORES
from moe_ops.ops.route_replaying import route_replaying
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import BF16, F16, F32, TOL, Case, assert_close, make_layer
from tests.chosen import those_of
from tests.company import alone, assert_invariant, batches
from tests.independent_rows import call_of, rows_of

FLOATS = ("", "")
# Every pair of formats of which there is a scheme, those of weights alone among them, and floats.
PAIRS = list(dict.fromkeys([FLOATS, *(p for s in SCHEMES.values() for p in s.pairs() if p[0])]))
# What no kernel of the CPU multiplies; libraries do, a row at a time.
BY_ROW = [p for p in PAIRS if "mxfp6" in p[0] or p[1][:2] in ("mx", "nv") or p[0] == "nvfp4"]
QUICK = (
    FLOATS, ("int8:row", "int8:row"), ("mxfp4", ""), ("mxfp4", "float8_e4m3fn:row"),
    ("nvfp4", "nvfp4"), ("mxfp6_e3m2", ""), ("mxfp8", "mxfp8"),
)  # fmt: skip
CASE = Case(name="mates", T=6, E=4, K=2, D=256, I=256)
ODD = Case(name="odd", T=5, E=3, K=2, D=91, I=38)
FEW, MANY = 8, 200
each_number = pytest.mark.parametrize(
    "number", [FEW, pytest.param(MANY, marks=pytest.mark.every)], ids=str
)
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
OF_ROWS = ("x_TD", "ids_TK", "weights_TK", "x_scale_TG")
LINEARS = ("q6_k", "mxfp6_e3m2", "mxfp8", "float8_e4m3fn:128x128")


def layer(formats: tuple[str, str], dtype: torch.dtype, case: Case = CASE) -> ExpertsCall:
    weights, inputs = formats
    if weights:
        call = call_of(weights, inputs or "float8_e4m3fn:row", dtype, case)
        return call if inputs else replace(call, x_format="")
    made = make_layer(case, dtype)
    given = (made.x_TD, made.weights_TK, made.ids_TK, made.w13_EFD, made.w2_EDI)
    return ExpertsCall(*given)


def run(call: ExpertsCall) -> Tensor:
    with moe_ops.using(batch_invariant=True):
        out: Tensor = experts(*experts.arguments.flat(call))
    return out


def backend_of(call: ExpertsCall) -> str:
    with moe_ops.using(batch_invariant=True):
        return experts.pick(call).name


@each_number
@each_dtype
@pytest.mark.parametrize("formats", those_of(QUICK, PAIRS), ids="-".join)
def test_in_any_company(formats: tuple[str, str], dtype: torch.dtype, number: int) -> None:
    call = layer(formats, dtype)
    assert backend_of(call) == ("by_row" if formats in BY_ROW else "cpu")
    assert_invariant(run, call, number)


@each_number
@pytest.mark.parametrize("formats", those_of((FLOATS, ("mxfp4", "mxfp8")), PAIRS), ids="-".join)
def test_float16_in_any_company(formats: tuple[str, str], number: int) -> None:
    """Which no kernel of the CPU multiplies."""
    call = layer(formats, F16)
    assert backend_of(call) == "by_row"
    assert_invariant(run, call, number)


def by_columns(call: ExpertsCall) -> ExpertsCall:
    w13_EDF, w2_EID = (w.transpose(1, 2).contiguous() for w in (call.w13_EFD, call.w2_EDI))
    return replace(call, w13_EFD=w13_EDF, w2_EDI=w2_EID, transposed=True)


@each_number
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
def test_weights_by_columns(dtype: torch.dtype, number: int) -> None:
    """As those of GPT-OSS, with its biases; and without rows, whose weights are the same."""
    call, E = layer(FLOATS, dtype, ODD), ODD.E
    biases = {
        name: torch.randn(E, n).to(dtype) for name, n in (("b13_EF", 2 * ODD.I), ("b2_ED", ODD.D))
    }
    rows, columns = replace(call, **biases), replace(by_columns(call), **biases)
    assert backend_of(columns) == "by_row"
    assert_invariant(run, columns, number)
    assert_close(run(columns), run(rows).float(), TOL["experts", dtype])


def as_codes(call: ExpertsCall) -> ExpertsCall:
    x_TD, scale_TG = quantize(call.x_TD, call.x_format)
    return replace(call, x_TD=x_TD, x_scale_TG=scale_TG, out_dtype="bfloat16")


def scales_of_experts(call: ExpertsCall) -> ExpertsCall:
    each = {name: torch.rand(CASE.E) / 50 + 0.01 for name in ("x_scale", "h_scale")}
    return replace(call, **each)


def mapped(call: ExpertsCall) -> ExpertsCall:
    """Of eight experts four are here, and ids name no expert, too."""
    ids_TK = call.ids_TK * 2
    ids_TK[0, 0], ids_TK[1, 1] = -1, 7
    return replace(call, ids_TK=ids_TK, expert_map=torch.tensor([0, -1, 1, -1, 2, -1, 3, -1]))


# Layers that are run a row at a time, each with what it has beside others.
WITH: dict[str, tuple[tuple[str, str], Callable[[ExpertsCall], ExpertsCall]]] = {
    "tokens as codes": (("mxfp4", "mxfp8"), as_codes),
    "static scales of each expert": (("mxfp6_e3m2", "float8_e4m3fn:tensor"), scales_of_experts),
    "a map of experts": (("nvfp4", "nvfp4"), mapped),
    "another activation": (
        ("mxfp6_e2m3", ""),
        lambda call: replace(call, interleaved=True, alpha=1.7, limit=7.0, up_shift=1.0),
    ),
}


@pytest.mark.parametrize("which", WITH)
def test_arguments_of_layers_by_row(which: str) -> None:
    formats, changed = WITH[which]
    call = changed(layer(formats, BF16))
    assert backend_of(call) == "by_row"
    whole, want = run(call), experts.reference(*experts.arguments.flat(call))
    assert_close(whole, want.float(), TOL["experts", BF16])
    own = {name: t for name in OF_ROWS if (t := getattr(call, name)) is not None}

    def part(rows: slice) -> Tensor:
        return run(replace(call, **{name: t[rows] for name, t in own.items()}))

    assert torch.equal(torch.cat([part(slice(t, t + 1)) for t in range(CASE.T)]), whole)
    assert part(slice(0, 0)).shape == (0, CASE.D)


@each_number
@each_dtype
def test_widths_that_fill_no_register(dtype: torch.dtype, number: int) -> None:
    assert_invariant(run, layer(FLOATS, dtype, ODD), number)


def test_the_property_is_of_the_mode() -> None:
    """Of many rows others are multiplied than of one, where nobody asks for the same bits."""
    call = layer(("uint4:1x64", ""), F32)
    found = [batch for kind, _, _, batch in batches(call, FEW) if kind == "copies"]
    differ = False
    for batch in found:
        got = experts(*experts.arguments.flat(batch))
        differ |= not torch.equal(rows_of(got, slice(None)), rows_of(run(batch), slice(None)))
    assert found and differ
    one = next(iter(batches(call, 1)))[3]
    assert torch.equal(run(one), alone(one, lambda c: experts(*experts.arguments.flat(c))))


def test_a_gradient_of_codes_is_refused() -> None:
    """Inputs are rounded, so that no formula has it."""
    call = layer(("mxfp8", "mxfp8"), F32)
    with pytest.raises(NotImplementedError) as raised:
        run(replace(call, x_TD=call.x_TD.clone().requires_grad_()))
    assert "experts gives these rows the same bits in any batch" in str(raised.value)
    assert "by_row: is not differentiable" in str(raised.value)


@pytest.mark.parametrize("static", [(), ("x_scale",), ("h_scale",)], ids=["none", "x", "h"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
def test_one_scale_of_all_tokens_is_refused(dtype: torch.dtype, static: tuple[str, ...]) -> None:
    made = {n: None for n in ("x_scale", "h_scale") if n not in static}
    call = replace(layer(("int8:row", "int8:tensor"), dtype), **made)
    with pytest.raises(NotImplementedError) as raised:
        run(call)
    who = "cpu" if dtype is F32 else "by_row"
    said = f"{who}: is not batch invariant: one scale for all tokens is made of"
    assert said in str(raised.value)


def test_libraries_are_refused_by_name() -> None:
    with moe_ops.using("aten", "experts"), pytest.raises(NotImplementedError) as raised:
        run(layer(FLOATS, F32))
    assert "aten: is not batch invariant: its sums may depend on the number" in str(raised.value)


def test_an_infinite_neighbour_changes_no_overflow() -> None:
    """Sums with zero points are made again of tokens that are infinite, and of no others."""
    call = layer(("uint4:1x64", ""), F32)
    huge = replace(call, x_TD=call.x_TD * 1e38)
    infinite = replace(huge, x_TD=huge.x_TD.clone())
    infinite.x_TD[-1] = float("inf")
    got, want = run(infinite)[:-1], run(huge)[:-1]
    assert torch.equal(rows_of(got, slice(None)), rows_of(want, slice(None)))
    assert not bool(want.isfinite().all())


# Formats of weights that are frozen, of tokens that train.
FROZEN = [p for p in PAIRS if p[0] and not p[1]]


def train_tokens(call: ExpertsCall) -> Tensor:
    out = run(replace(call, x_TD=call.x_TD.clone().requires_grad_()))
    assert out.requires_grad
    return out.detach()


@each_dtype
@pytest.mark.parametrize(
    "formats", those_of((("int8:row", ""), ("nvfp4", "")), FROZEN), ids="-".join
)
def test_frozen_codes_in_a_forward_that_saves(formats: tuple[str, str], dtype: torch.dtype) -> None:
    """Its rows have the bits that they have where nothing trains."""
    call = layer(formats, dtype)
    assert_invariant(train_tokens, call, FEW)
    assert torch.equal(train_tokens(call), run(call))


@pytest.mark.parametrize("columns", [False, True], ids=["by rows", "by columns"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
def test_a_forward_that_saves_for_a_backward(dtype: torch.dtype, columns: bool) -> None:
    """Its rows, too, have the bits that they have alone, and where nothing trains."""
    call = layer(FLOATS, dtype, ODD)
    call = by_columns(call) if columns else call

    def train(c: ExpertsCall) -> Tensor:
        trained = replace(c, w2_EDI=c.w2_EDI.clone().requires_grad_())
        out = run(trained)
        assert out.requires_grad
        return out.detach()

    assert_invariant(train, call, FEW)
    assert torch.equal(train(call), run(call))
    trained = replace(call, w13_EFD=call.w13_EFD.clone().requires_grad_())
    with moe_ops.using(batch_invariant=True):  # a backward sums over rows, whatever is asked for
        run(trained).sum().backward()
    assert trained.w13_EFD.grad is not None and bool(trained.w13_EFD.grad.isfinite().all())


def test_an_activation_fills_no_register() -> None:
    """PyTorch computes the last numbers of a tensor by other functions than the rest."""
    y_RF = torch.randn(67, 22)
    with moe_ops.using(batch_invariant=True):
        want = torch.cat([moe_ops.activate(y_RF[r : r + 1]) for r in range(len(y_RF))])
        assert torch.equal(moe_ops.activate(y_RF), want)


@pytest.mark.parametrize("score", SCORES)
def test_experts_that_are_given(score: str) -> None:
    """Their scores fill no register either, and are those of experts that are chosen."""
    logits_TE = torch.randn(67, 9)
    with moe_ops.using(batch_invariant=True):
        weights_TK, ids_TK = moe_ops.route(logits_TE, 3, score=score)
        given_TK = ids_TK.to(torch.int16)
        together, _ = route_replaying(logits_TE, 3, given_TK, score=score)
        rows = [slice(t, t + 1) for t in range(len(logits_TE))]
        alone = [route_replaying(logits_TE[r], 3, given_TK[r], score=score)[0] for r in rows]
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(together, weights_TK)


OF_ROUTE: dict[str, dict[str, Any]] = {
    "softmax": {},
    "renormalized": {"score": "sigmoid", "renormalize": True, "scale": 2.5},
    "of the chosen": {"score": "logit", "softmax_selected": True},
    "in groups": {"score": "sqrtsoftplus", "n_group": 3, "topk_group": 2, "group_fill": "zero"},
}


@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("options", OF_ROUTE.values(), ids=OF_ROUTE)
def test_routers_that_train(options: dict[str, Any], given: bool) -> None:
    """Their weights have the bits that they have without gradients, and the definition's."""
    grad_TK = torch.randn(37, 3)
    logits_TE, scale_E = (t.requires_grad_() for t in (torch.randn(37, 9), torch.rand(9)))
    want_TK, ids_TK = moe_ops.route(logits_TE, 3, None, scale_E, **options)
    want = torch.autograd.grad(want_TK, (logits_TE, scale_E), grad_TK)

    def run(rows: slice) -> Tensor:
        if not given:
            return moe_ops.route(logits_TE[rows], 3, None, scale_E, **options)[0]
        ids = ids_TK[rows].to(torch.int16)
        return route_replaying(logits_TE[rows], 3, ids, None, scale_E, **options)[0]

    with moe_ops.using(batch_invariant=True):
        together = run(slice(None))
        with torch.no_grad():
            alone = torch.cat([run(slice(t, t + 1)) for t in range(37)])
        got = torch.autograd.grad(together, (logits_TE, scale_E), grad_TK)
    assert torch.equal(together.detach(), alone)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_layer_that_trains_in_compiled_code_says_so_or_obeys() -> None:
    """Dynamo leaves the code that it cannot trace, and would begin anew behind it."""
    layer = moe_ops.MoELayer(4, 2, 91, 38, internal_gate=True, batch_invariant=True)
    x = torch.randn(33, 91)
    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=True, options=moe_ops.inductor_options())
    whole = compiled(x)
    assert whole.requires_grad
    assert torch.equal(torch.cat([compiled(x[t : t + 1]) for t in range(33)]), whole)
    whole.sum().backward()
    assert layer.gate is not None and layer.gate.weight.grad is not None
    torch._dynamo.reset()
    with pytest.raises(Exception, match="is not carried into a compiled graph with gradients"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.slow
def test_models_that_train_in_a_compiled_graph() -> None:
    """The gate, its choice and the experts obey; the backward is asked for nothing."""
    layer = moe_ops.MoELayer(8, 2, 256, 200, internal_gate=True)
    x = torch.randn(70, 256)
    layer(x).square().sum().backward()
    want = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    compiled = moe_ops.compile(layer, batch_invariant=True)
    whole = compiled(x)
    for rows in (slice(0, 1), slice(5, 7), slice(3, 20)):
        assert torch.equal(compiled(x[rows].clone()), whole[rows])
    whole.square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, want[name], rtol=1e-4, atol=1e-4), name


@each_dtype
@pytest.mark.parametrize(
    "format", ["int8:row", "nvfp4", *(pytest.param(f, marks=pytest.mark.every) for f in LINEARS)]
)
def test_linear_layers_in_codes(format: str, dtype: torch.dtype) -> None:
    done = packing.quantize(torch.randn(1, 96, 256), Format.of(format))
    x_TK = torch.randn(70, 256).to(dtype)
    common = torch.full((1,), 0.5) if Format.of(format).has_global_scale else None
    given = ([done.values[0]], [done.scale[0]], [None], [common], [torch.randn(96)], format)
    with moe_ops.using(batch_invariant=True):
        (together,) = quantized_linears(x_TK, *given)
        (want,) = quantized_linears.reference(x_TK, *given)
        assert_close(together, want.float(), TOL["expert_gemm", dtype])
        for rows in (slice(0, 1), slice(69, 70), slice(3, 20)):
            assert torch.equal(quantized_linears(x_TK[rows], *given)[0], together[rows])


def test_a_linear_layer_of_its_own() -> None:
    linear = nn.Linear(91, 30)
    x = torch.randn(2, 40, 91)
    with torch.inference_mode():
        whole = apply_linear(linear, x, True)
        assert torch.equal(apply_linear(linear, x[:1, :3], True), whole[:1, :3])
        assert torch.allclose(whole, linear(x), atol=1e-5)
        noted: list[object] = []
        linear.register_forward_hook(lambda *args: noted.append(args))
        apply_linear(linear, x, True)
    assert noted  # whoever looks at calls sees them


def test_a_gate_is_one_where_its_layer_is_called_so() -> None:
    made = moe_ops.MoELayer(4, 2, 91, 38, internal_gate=True)
    x = torch.randn(70, 91)
    with torch.inference_mode(), moe_ops.using(batch_invariant=True):
        whole = made(x)
        alone = torch.cat([made(x[t : t + 1]) for t in range(len(x))])
    assert torch.equal(alone, whole)
