"""Adapters of the experts of every family, beside peft's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.hf.adapters.wrapped import AdaptedExperts, experts_of, is_wrapper
from moe_ops.hf.experts import describe, is_experts
from moe_ops.testing import F32, TOL, assert_close
from tests.chosen import CHOSEN, those_of
from tests.hf import families
from tests.hf.adapters.models import peft, randomised

MODEL = TOL["model", F32]
DIVIDES = {"ernie4_5_vl_moe"}  # tokens among experts of text and of pictures


def adapted(family: str) -> Any:
    """A tiny model of a family with an adapter on both weights of all its experts."""
    tiny = families.build(family)
    names = [
        f"{path}.{name}"
        for path, module in tiny.model.named_modules()
        if is_experts(module)
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    ]
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=[], target_parameters=names, init_lora_weights=False
    )
    tiny.model.requires_grad_(False)
    peft.inject_adapter_in_model(config, tiny.model)
    return tiny


def results(tiny: Any) -> tuple[Any, dict[str, Any]]:
    tiny.model.zero_grad()
    out = tiny.model(**tiny.inputs, use_cache=False)[0]
    out.square().mean().backward()
    found = {n: p.grad for n, p in tiny.model.named_parameters() if p.grad is not None}
    return out.detach(), found


@pytest.mark.parametrize("family", those_of(CHOSEN, families.discover()))
def test_forward_and_gradients_are_those_of_peft(family: str) -> None:
    tiny = adapted(family)
    want, gradients = results(tiny)
    assert len(gradients) > 0
    moe_ops.optimize(tiny.model)
    held = [m for m in tiny.model.modules() if isinstance(m, AdaptedExperts)]
    wrapped = {id(experts_of(m)) for m in tiny.model.modules() if is_wrapper(m)}
    assert len(held) == len(wrapped) > 0
    for one in held:  # what our ops cannot express peft runs
        found = describe(experts_of(one))
        assert one.refusal() == (found if isinstance(found, str) else None)
    got, found = results(tiny)
    assert_close(got, want, MODEL)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, MODEL, name)


@pytest.mark.parametrize("family", those_of(CHOSEN, families.discover()))
def test_each_sequence_has_its_adapter(family: str) -> None:
    tiny = families.build(family)
    model, inputs = tiny.model, tiny.inputs
    found = (describe(m) for m in model.modules() if is_experts(m))
    reason = next((text for text in found if isinstance(text, str)), None)
    if reason is not None:
        with pytest.raises(ValueError, match=re.escape(f"gets no adapter: {reason}")):
            moe_ops.add_adapter(model, 2)
        return
    moe_ops.add_adapter(model, 2)
    randomised(model)

    def states() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = model(**inputs, use_cache=False)[0]
        return out

    adapted_ones = states()
    moe_ops.set_adapter(model, None)
    plain = states()
    assert not torch.allclose(adapted_ones, plain)
    names = [None, "default"]
    if family in DIVIDES:
        with pytest.raises(ValueError, match="has several modules of experts, which tokens"):
            moe_ops.adapters(model, names).__enter__()
        return
    with moe_ops.adapters(model, names):
        got = states()
    assert_close(got[0], plain[0], MODEL)
    assert_close(got[1], adapted_ones[1], MODEL)
