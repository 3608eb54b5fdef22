"""Every MoE family of transformers gives on our ops what it gives on its own code."""

from __future__ import annotations

import logging

import pytest
import torch

import moe_ops
from moe_ops.testing import F32, TOL, assert_close
from tests.chosen import CHOSEN
from tests.hf import families

MODEL = TOL["model", F32]

# Experts that the `experts` op cannot express, and routers that `route` cannot, with the reason.
EXPERTS_BY_TRANSFORMERS = {
    "inkling2": "its activation softcaps both halves",
    "inkling2_loop": "its activation softcaps both halves",
    "muse_spark": "it normalises each expert's output",
}
ROUTERS_BY_TRANSFORMERS = {
    "inkling": "softmax over routed and shared logits together",
    "phimoe": "sparsemixer",
    "zaya": "state from layer to layer, and a skip expert",
    "jamba": "before transformers 5.23 its router is a plain linear",
}


# Of every kind of router and of experts one; all of them are slow together.
QUICK = (
    "qwen3_moe", "mixtral", "gemma4", "deepseek_v2", "ernie4_5_moe", "gpt_oss", "granitemoe",
    "deepseek_v3", "glm4_moe", "minimax_m2", "llama4", "aria", "nemotron_h", "jamba", "phimoe",
)  # fmt: skip


def marks(family: str) -> list[pytest.MarkDecorator]:
    """Quick families are in `make check`, chosen ones in `make test`, all in `make test-all`."""
    if family in QUICK:
        return []
    return [pytest.mark.slow] if family in CHOSEN else [pytest.mark.slow, pytest.mark.every]


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=marks(family)) for family in families.discover()]
)
def test_a_family_computes_the_same_on_our_ops(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moe_ops.hf.report._said", set())
    stock = families.build(family)
    inputs = families.inputs_for(stock, batch=2, length=7, seed=1)
    want = families.run(stock, inputs)
    want_tokens = generate(stock, inputs)

    ours = families.build(family, "moe_ops")
    with caplog.at_level(logging.WARNING, logger="moe_ops"):
        assert_close(families.run(ours, inputs), want, MODEL, f"{family} with our experts")
    fallbacks = [m for m in caplog.messages if "grouped_mm" in m]
    assert bool(fallbacks) == (family in EXPERTS_BY_TRANSFORMERS), fallbacks
    assert len(set(fallbacks)) == len(fallbacks)

    moe_ops.optimize(ours.model)
    if family not in ROUTERS_BY_TRANSFORMERS:
        assert ours.model._moe_ops_state.routers, "no router of this family is known"
    assert_close(families.run(ours, inputs), want, MODEL, f"{family} with our experts and routers")
    if want_tokens is not None:
        assert torch.equal(generate(ours, inputs), want_tokens)


def generate(tiny: families.TinyModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Eight greedy tokens, or None for a family that does not generate text."""
    if not tiny.can_generate:
        return None
    with torch.no_grad():
        return tiny.model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
