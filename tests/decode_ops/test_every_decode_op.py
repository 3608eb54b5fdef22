"""Every decode op has a record, a fake and backends, as the stages of a layer have."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import OPS, fake_impls, using
from moe_ops.decode_ops import rope_attention
from moe_ops.registry.spec import DECODE_OPS
from moe_ops.testing import BF16, CASES, F32, make_layer


def steps() -> dict[str, Any]:
    """A step of rope_attention, in the fourth of five slots."""
    B, H, N, S, D = 2, 4, 2, 5, 16
    shapes = {"q_BHD": (B, H, D), "k_BND": (B, N, D), "v_BND": (B, N, D)}
    shapes |= {"cos_BW": (B, D), "sin_BW": (B, D)}
    found: dict[str, Any] = {name: torch.randn(s).to(BF16) for name, s in shapes.items()}
    found["slot"] = torch.tensor([3])
    found |= {name: torch.randn(B, N, S, D).to(BF16) for name in ("keys_BNSD", "values_BNSD")}
    found |= {"mask_BS": (torch.arange(S) <= 3).expand(B, S).contiguous(), "scale": 0.25}
    return found | {"q_gain_D": torch.rand(D).to(BF16), "k_gain_D": torch.rand(D).to(BF16)}


def linear_layers() -> dict[str, tuple[Any, ...]]:
    """One token, and three, of layers that keep a state, and of the convolutions before them."""
    T, H, N, D, V = 3, 4, 2, 16, 8
    q, k, v = torch.randn(2, T, N, D), torch.randn(2, T, N, D), torch.randn(2, T, H, V)
    g, beta, ones = -torch.rand(2, T, H), torch.rand(2, T, H), torch.ones(H)
    state = torch.randn(2, H, D, V)
    rule, space = (q, k, v, g, beta), (v, beta, -ones, q, k)
    of_heads = (ones, ones / 2, True)
    one_rule, one_space = (
        [t[:, 0] if t.dim() > 1 else t for t in given] for given in (rule, space)
    )  # fmt: skip
    x, inputs, weight = torch.randn(2, D), torch.randn(2, D, 4), torch.randn(D, 4)
    return {
        "convolution_step": (x, inputs, weight, torch.randn(D), True),
        "delta_rule": (*rule, state, 0.25, True),
        "delta_rule_step": (*one_rule, state, 0.25, True),
        "state_space_scan": (*space, state.mT.contiguous(), 0.0, 0.5, *of_heads),
        "state_space_step": (*one_space, state.mT.contiguous(), *of_heads),
    }


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of each op, on a CPU."""
    x, w, b = torch.randn(1, 32).to(BF16), torch.randn(8, 32).to(BF16), torch.randn(8).to(BF16)
    weights, biases = [w, w * 2], [b, None]
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    layer = make_layer(CASES[0], F32, "cpu")
    tensors = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    return {
        "experts_onto": (torch.randn_like(layer.x_TD), *tensors),
        "linears": (x, weights, biases),
        "normed_linears": (x, x * 2, torch.rand(32).to(BF16), 1e-6, weights, biases),
        "one_query": (q, k, v, torch.ones(2, 5, dtype=torch.bool), 0.25, torch.randn(4)),
        "one_query_latents": (
            *(q, q[..., :8], k[:, 0].contiguous(), v[:, 0, :, :8].contiguous()),
            *(torch.ones(2, 5, dtype=torch.bool), 0.25, torch.randn(4), torch.tensor([[3, 0]] * 2)),
        ),
        "rope_attention": tuple(steps().values()),
        **linear_layers(),
    }


CALLS = calls()
ON_CPU = {"one_query_latents": "aten"}  # what runs a call here, where it is not the definition
each_op = pytest.mark.parametrize("name", DECODE_OPS)


def test_names_are_those_of_no_stage() -> None:
    assert set(DECODE_OPS) == set(CALLS) and not set(DECODE_OPS) & set(OPS)
    assert set(fake_impls.__all__) == set(DECODE_OPS) | set(OPS)


@each_op
def test_the_schema_and_the_fake_are_true(name: str) -> None:
    op = DECODE_OPS[name]
    assert op.fake_impl is getattr(fake_impls, name)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.overload, copy.deepcopy(CALLS[name]), test_utils=tests)


@each_op
def test_a_call_a_part_and_a_plan_give_the_definition(name: str) -> None:
    op, args = DECODE_OPS[name], CALLS[name]
    planned = functools.partial(op.planned, plan="reference")
    want = op.reference(*copy.deepcopy(args))
    with using("reference", name):
        forced = op(*copy.deepcopy(args))
    for got in (planned(*copy.deepcopy(args)), forced):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    run = op.backends[ON_CPU.get(name, "reference")].run
    got, want = op(*copy.deepcopy(args)), run(op.call(*copy.deepcopy(args)))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@each_op
def test_kernels_refuse_what_is_on_a_cpu(name: str) -> None:
    refusals = DECODE_OPS[name].refusals(*CALLS[name])
    assert refusals.pop("reference") is None and refusals.pop(ON_CPU.get(name), None) is None
    assert set(refusals.values()) == {"needs a tensor on cuda, got cpu"}


@each_op
def test_a_wrong_type_names_the_argument(name: str) -> None:
    op, args = DECODE_OPS[name], list(CALLS[name])
    for place, parameter in enumerate([*op.arguments.signature.parameters][: len(args)]):
        bad = [*args[:place], object(), *args[place + 1 :]]
        with pytest.raises(TypeError, match=f"moe_ops.{name}: {parameter} must be "):
            op(*bad)


def test_a_list_is_told_by_what_it_holds() -> None:
    x, weights, biases = CALLS["linears"]
    for bad in (weights[0], [weights[0], None], [1, 2]):
        with pytest.raises(TypeError, match="weights must be a list of which each is a Tensor"):
            DECODE_OPS["linears"](x, bad, biases)
    with pytest.raises(TypeError, match="biases must be a list of which each is a Tensor or None"):
        DECODE_OPS["linears"](x, weights, [1, None])
    subclassed = [torch.nn.Parameter(w, requires_grad=False) for w in weights]
    torch.testing.assert_close(
        DECODE_OPS["linears"](x, subclassed, biases), DECODE_OPS["linears"](x, weights, biases)
    )


def test_autograd_sees_that_caches_change() -> None:
    """What was saved for a gradient before cannot be used after."""
    given = steps()
    keys: Tensor = given["keys_BNSD"]
    leaf = torch.ones_like(keys).requires_grad_()
    total = (leaf * keys).sum()
    rope_attention(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


DIFFERENTIABLE = ["linears", "normed_linears", "one_query", "delta_rule", "state_space_scan"]


def total_of(out: Any) -> Tensor:
    return sum(
        (y.float().sum() for y in (out if isinstance(out, (list, tuple)) else [out])),
        start=torch.zeros(()),
    )


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_trace_differentiates_the_definition(name: str) -> None:
    op = DECODE_OPS[name]
    first, *rest = copy.deepcopy(CALLS[name])

    def total(t: Tensor) -> Tensor:
        return total_of(op(t, *rest))

    def defined(t: Tensor) -> Tensor:
        return total_of(op.reference(t, *rest))

    torch.testing.assert_close(torch.func.grad(total)(first), torch.func.grad(defined)(first))
