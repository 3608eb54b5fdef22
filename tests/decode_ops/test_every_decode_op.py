"""Every decode op has a record, a fake and backends, as the stages of a layer have."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import OPS, fake_impls, using
from moe_ops.conformance.decode_samples import DECODE_MAKERS
from moe_ops.conformance.samples import samples
from moe_ops.decode_ops import rope_attention
from moe_ops.registry.spec import DECODE_OPS
from moe_ops.testing import BF16, CASES, F32


def args_of(name: str) -> tuple[Any, ...]:
    """Arguments of an op, for two sequences in float32 if it takes them."""
    two, one = (replace(CASES[0], T=T) for T in (2, 1))
    found = (samples(name, case, dtype) for case in (two, one) for dtype in (F32, BF16))
    return next(iter(next(filter(None, found)))).args


CALLS = {name: args_of(name) for name in DECODE_MAKERS}
# What runs a call here, the first that does not refuse it, where it is not the definition.
ON_CPU = {"one_query_latents": ("aten",), "quantized_linears": ("cpu", "dequantize")}
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
    run = op.backends[ON_CPU.get(name, ("reference",))[0]].run
    got, want = op(*copy.deepcopy(args)), run(op.call(*copy.deepcopy(args)))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@each_op
def test_kernels_refuse_what_is_on_a_cpu(name: str) -> None:
    op = DECODE_OPS[name]
    refusals = op.refusals(*CALLS[name])
    asked_for = [refusals.pop(n) or "" for n, b in op.backends.items() if b.only_invariant]
    assert all("using(batch_invariant=True) asks for" in refusal for refusal in asked_for)
    assert all(refusals.pop(here) is None for here in ("reference", *ON_CPU.get(name, ())))
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
    given = rope_attention.arguments.by_name(
        rope_attention.call(*copy.deepcopy(CALLS["rope_attention"]))
    )
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
