"""Compiled models with adapters of their experts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.testing import F32, TOL, assert_close
from tests.hf.adapters.models import choose, ids_of, logits, peft, tokens, twin_of, wrapped
from tests.hf.adapters.test_rows import NAMES, WAYS, alone, by_ours
from tests.hf.adapters.test_wrapped import adapted, check_gradients, grads, train
from tests.hf.test_quantize import gpt_oss, qwen

MODEL = TOL["model", F32]


# What a step of such models computes is in test_captured.py.
@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_compiled_model_follows_its_adapters(way: Any, caplog: Any) -> None:
    model, chosen = way(qwen)
    ids = ids_of(3)
    want, theirs = alone(model, chosen, ids)
    with caplog.at_level(logging.INFO, "moe_ops"):
        fast = moe_ops.compile(model)
        for row, name in enumerate(NAMES):
            chosen(model, name)
            assert_close(logits(fast, ids)[row], want[row], MODEL)
            assert torch.equal(tokens(fast, ids)[row], theirs[row])
        with moe_ops.adapters(fast, NAMES):
            assert_close(logits(fast, ids), want, MODEL)
            assert torch.equal(tokens(fast, ids), theirs)
    assert "2 of 2 MoE layers and 2 of 2 routers run on moe_ops" in caplog.text
    assert "peft" not in caplog.text
    (report,) = {r.rows: r for r in moe_ops.generation_report(fast)}.values()
    assert report.steps > 0
    assert moe_ops.graph_report(fast).generation


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("make", [qwen, gpt_oss])
def test_gradients_of_a_compiled_model(make: Any) -> None:
    model = train(wrapped(make()))
    want = grads(model)
    fast = moe_ops.compile(model)
    check_gradients(grads(fast), want)
    assert type(fast) is type(model)


@pytest.mark.slow
@pytest.mark.every
def test_gradients_of_compiled_codes() -> None:
    model, _ = by_ours(qwen)
    want = grads(model)
    check_gradients(grads(moe_ops.compile(model)), want)


@pytest.mark.slow
@pytest.mark.every
def test_explain_says_what_runs_adapters_and_why_another_way() -> None:
    model = wrapped(qwen(), "one", "two")
    text = str(moe_ops.explain(model, {"input_ids": ids_of()}))
    assert "experts_adapted, 2 layers: model.layers.{0-1}.mlp.experts" in text
    assert "2 of 2 MoE layers and 2 of 2 routers run on moe_ops" in text
    model.base_model.set_adapter(["one", "two"])
    text = str(moe_ops.explain(model, {"input_ids": ids_of()}))
    assert "model.layers.{0-1}.mlp.experts: adapters: several adapters are active at once" in text
    experts = model.get_base_model().model.layers[0].mlp.experts
    assert type(experts) is peft.tuners.lora.layer.ParamWrapper  # as it was


@pytest.mark.slow
@pytest.mark.every
def test_explain_says_the_same_of_a_twin() -> None:
    twin = twin_of(wrapped(qwen(), "one", "two"))
    text = str(moe_ops.explain(twin, {"input_ids": ids_of()}))
    assert "experts_adapted, 2 layers: model.layers.{0-1}.mlp.experts" in text
    assert all(m.bank.follows for m in adapted(twin))


def test_a_model_in_a_wrapper_of_peft_without_experts_keeps_its_generate(caplog: Any) -> None:
    model = wrapped(qwen(), target=(), target_modules=["q_proj"])
    with caplog.at_level(logging.WARNING, "moe_ops"):
        twin = moe_ops.compile(model)
    assert caplog.messages == []
    assert type(twin) is type(model)
    choose(twin, None)
    assert vars(twin.get_base_model())["_moe_ops_generation"] is not None
