"""Experts that train by Triton's kernels in invariant calls, in its interpreter without a GPU: the
bits of their results are those that they have where nothing trains, in other company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import OPS
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.experts_saving import ExpertsSavingCall, experts_saving
from moe_ops.registry.backend import ONLY_INVARIANT
from moe_ops.registry.invariance import invariant
from moe_ops.testing import (
    ACTIVATIONS,
    BF16,
    CASES,
    DEVICE,
    F16,
    F32,
    TOL,
    Case,
    assert_close,
    make_layer,
)
from tests.chosen import in_turn
from tests.kernels.codes import quantized
from tests.kernels.sampled import hold
from tests.layer.shards import randomize
from tests.random_batches import bits

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_twice import NAME

# The interpreter multiplies no bfloat16.
HALVES = (BF16, F16) if DEVICE == "cuda" else (F16,)
SIZES = Case(name="some", T=40, E=4, K=2, D=128, I=96)
COMPANY = (1, 2, 9, 40)  # the rows that train at once
OF_TRAINING = ("experts_saving", "experts_backward", "expert_wgrad", "activate_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What a layer has beside its weights."""

    format: str = ""
    biases: bool = False
    transposed: bool = False
    holes: bool = False
    act: dict[str, Any] = field(default_factory=dict)


LAYERS = {
    "gated": Layer(),
    "ungated": Layer(act=ACTIVATIONS["ungated_relu2"]),
    "biases": Layer(biases=True),
    "of GPT-OSS, by columns": Layer(biases=True, transposed=True, act=ACTIVATIONS["gpt_oss"]),
    "pairs of no expert": Layer(holes=True),
}
FROZEN = {
    "int4": Layer(format="int4:1x32"),
    "int4, biases": Layer(format="int4:1x32", biases=True),
    "float8 by row": Layer(format="float8_e4m3fn:row"),
    "nvfp4, biases": Layer(format="nvfp4", biases=True),
    "nf4, ungated": Layer(format="nf4", act=ACTIVATIONS["ungated_relu2"]),
}


def call_of(layer: Layer, dtype: torch.dtype) -> ExpertsCall:
    gated = layer.act.get("gated", True)
    made = make_layer(SIZES, dtype, DEVICE, gated=gated, transposed=layer.transposed)
    weights: dict[str, Any] = {"w13": made.w13_EFD, "w2": made.w2_EDI}
    if layer.format:
        weights = quantized(made.w13_EFD, made.w2_EDI, layer.format)
    biases = {"b13_EF": made.b13_EF, "b2_ED": made.b2_ED} if layer.biases else {}
    if layer.holes:
        made.ids_TK[3], made.ids_TK[5, 1] = -1, -1
    routed = made.x_TD, made.weights_TK, made.ids_TK, weights.pop("w13"), weights.pop("w2")
    call = experts.call(*routed, **weights, **biases, transposed=layer.transposed, **layer.act)
    experts.check(call)
    return call


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the backends of Triton, and no others, run layers here. Gives the names of those that ran
    an op of training."""
    ran: list[str] = []
    for op in (experts, *(OPS[name] for name in OF_TRAINING)):
        found = {}
        for name, backend in op.backends.items():

            def run(call: Any, ran_by: str = f"{op.name} by {name}", run: Any = backend.run) -> Any:
                ran.append(ran_by)
                return run(call)

            if name.startswith("triton"):
                found[name] = backend.changed(devices=None, run=run)
        kept = {"reference": op.backends["reference"]}
        for name, value in {"_backends": found | kept, "_order": {}, "_plans": {}}.items():
            monkeypatch.setattr(op, name, value)
    experts.memo.clear()
    yield ran
    experts.memo.clear()


def rows_of(call: ExpertsCall, rows: Tensor) -> ExpertsCall:
    routed = ("x_TD", "weights_TK", "ids_TK")
    return replace(call, **{name: getattr(call, name)[rows].clone() for name in routed})


def run(call: ExpertsCall) -> Tensor:
    out_TD: Tensor = experts(*experts.arguments.flat(call))
    return out_TD


def trained(call: ExpertsCall) -> Tensor:
    """The result of a call whose tokens want a gradient."""
    out_TD = run(replace(call, x_TD=call.x_TD.clone().requires_grad_()))
    assert out_TD.requires_grad
    return out_TD.detach()


def check(call: ExpertsCall, ran: list[str]) -> None:
    draw = torch.Generator().manual_seed(0)
    with moe_ops.using(batch_invariant=True):
        want = run(call)
        for count in COMPANY:
            rows = torch.randperm(SIZES.T, generator=draw)[:count].to(DEVICE)
            ran.clear()
            got = trained(rows_of(call, rows))
            assert f"experts_saving by {NAME}" in ran
            assert torch.equal(bits(got), bits(want[rows])), count


@in_turn(
    pytest.mark.parametrize("dtype", (*HALVES, F32), ids=str),
    pytest.mark.parametrize("layer", LAYERS.values(), ids=[*LAYERS]),
)
def test_a_forward_that_trains_has_the_bits_of_others(
    layer: Layer, dtype: torch.dtype, by_triton: list[str]
) -> None:
    check(call_of(layer, dtype), by_triton)


@in_turn(
    pytest.mark.parametrize("dtype", HALVES, ids=str),
    pytest.mark.parametrize("layer", FROZEN.values(), ids=[*FROZEN]),
)
def test_so_has_one_on_frozen_codes(layer: Layer, dtype: torch.dtype, by_triton: list[str]) -> None:
    check(call_of(layer, dtype), by_triton)


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_layer(how: str, by_triton: list[str]) -> None:
    """With its gate, whose logits and weights are the same, too."""
    options = {"internal_gate": True, "dtype": HALVES[0], "batch_invariant": True}
    layer: Any = randomize(moe_ops.MoELayer(4, 2, 128, 96, **options)).to(DEVICE)
    x_TD = torch.randn(40, 128, device=DEVICE).to(HALVES[0])
    with torch.no_grad():
        want = layer(x_TD)
    if how == "compiled":
        layer.batch_invariant = False  # the graph has the option of `compile`
        layer = moe_ops.compile(layer, batch_invariant=True)
    for count in COMPANY:
        by_triton.clear()
        got = layer(x_TD[:count].clone())
        assert got.requires_grad
        assert any(ran.startswith("experts by triton") for ran in by_triton)
        assert torch.equal(bits(got.detach()), bits(want[:count])), count
        got.sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    assert all(g is not None and bool(g.isfinite().all()) for g in gradients)


OTHERS = [pytest.param(i, t, marks=pytest.mark.every) for i in (1, 2, 3) for t in (F16, F32)]


@pytest.mark.parametrize(("case", "dtype"), [(0, F16), *OTHERS])
def test_samples(case: int, dtype: torch.dtype) -> None:
    """Nothing is refused but codes of tokens in float32, which no kernel of ours multiplies."""
    with invariant():
        refused = hold(OPS["experts_saving"], CASES[case], dtype, NAME)
    said = ["needs bfloat16 or float16, got torch.float32"] if dtype == F32 else []
    assert {*refused.values()} == {*said}


@pytest.mark.parametrize(
    "layer", [LAYERS["biases"], FROZEN["int4, biases"]], ids=["floats", "int4"]
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_are_those_of_the_definition(layer: Layer, dtype: torch.dtype) -> None:
    call = call_of(layer, dtype)
    names = ["x_TD", "weights_TK", *([] if layer.format else ["w13_EFD", "w2_EDI"])]
    grad_TD = torch.randn(call.x_TD.shape, device=DEVICE)

    def grads(of: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        floats = {n: getattr(call, n) for n in {*names, "b13_EF", "b2_ED", "x_TD"}}
        given = {n: t.to(dtype, copy=True).requires_grad_(n in names) for n, t in floats.items()}
        leaves = [given[name] for name in names]
        out_TD = of(replace(call, **given))
        made = torch.autograd.grad(out_TD, leaves, grad_TD.to(dtype))
        return dict(zip(names, made, strict=True))

    with moe_ops.using(batch_invariant=True):
        got = grads(run, dtype)
    want = grads(experts.body, F32)
    for name in names:
        assert_close(got[name].float(), want[name], TOL["experts_backward", dtype], name)


def test_products_that_round_between_them_give_other_bits() -> None:
    """So they are refused, if they are asked for by name, too."""
    call = ExpertsSavingCall(call_of(LAYERS["gated"], HALVES[0]))
    with invariant():
        want = experts_saving.pick(call).run(call)
        got = experts_saving.backends["triton"].run(call)
        assert not torch.equal(got[0], want[0])
        for one, other in zip(got[1:], want[1:], strict=True):
            assert torch.equal(bits(one), bits(other))
    forced = moe_ops.using("triton", "experts_saving", batch_invariant=True)
    with forced, pytest.raises(NotImplementedError) as raised:
        experts_saving.pick(call)
    assert "triton: is not batch invariant: rounds or sums otherwise than" in str(raised.value)


@pytest.mark.parametrize("layer", [LAYERS["gated"], FROZEN["int4"]], ids=["floats", "int4"])
def test_other_calls_run_as_they_did(layer: Layer) -> None:
    call = ExpertsSavingCall(call_of(layer, HALVES[0]))
    name = "triton.decoded" if layer.format else "triton"
    assert experts_saving.pick(call).name == name
    assert experts_saving.backends[NAME].refusal(DEVICE, SIZES.T, call) == ONLY_INVARIANT


def test_what_experts_refuse_is_refused() -> None:
    """There are no bits to have."""
    call = ExpertsSavingCall(call_of(LAYERS["gated"], HALVES[0]))
    for name in [name for name in experts.backends if name != "reference"]:
        del experts._backends[name]
    with invariant():
        refusal = experts_saving.backends[NAME].refusal(DEVICE, SIZES.T, call)
    assert refusal is not None
    assert refusal.startswith("no backend of moe_ops.experts gives these rows the same bits")
