"""Models with adapters of their experts on a CUDA GPU, by captured steps, prompts and forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.testing import F32, TOL, assert_close
from tests.hf.adapters.models import ids_of, logits, tokens
from tests.hf.adapters.test_captured import set_scale, train
from tests.hf.adapters.test_rows import NAMES, WAYS, Choose
from tests.hf.test_quantize import gpt_oss, qwen

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
MODEL = TOL["model", F32]


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def adapted(request: pytest.FixtureRequest) -> tuple[Any, Choose]:
    model, chosen = request.param(qwen)
    return model.cuda(), chosen


def check(model: Any, fast: Any, ids: Tensor) -> None:
    for _ in range(4):  # what comes the third time is captured
        assert_close(logits(fast, ids), logits(model, ids), MODEL)
        assert torch.equal(tokens(fast, ids), tokens(model, ids))


def test_captured_calls_follow_adapters(adapted: tuple[Any, Choose]) -> None:
    model, chosen = adapted
    fast, ids = moe_ops.compile(model), ids_of().cuda()
    for name in ("one", "two", None, "one"):
        chosen(model, name)
        check(model, fast, ids)
    for change in (set_scale, train):
        change(model)
        check(model, fast, ids)
    assert all(report.captured for report in moe_ops.generation_report(fast))
    assert any(size.replays for size in moe_ops.graph_report(fast).forwards)


@pytest.mark.parametrize("make", [qwen, gpt_oss])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_sequence_has_its_adapter(way: Any, make: Any) -> None:
    model, chosen = way(make)
    model.cuda()
    ids, want, theirs = ids_of(3).cuda(), {}, {}
    for name in (None, "one", "two"):
        chosen(model, name)
        want[name], theirs[name] = logits(model, ids), tokens(model, ids)
    fast = moe_ops.compile(model)
    for names in (NAMES, NAMES[::-1], [None] * 3):
        with moe_ops.adapters(fast, names):
            for _ in range(4):
                states, found = logits(fast, ids), tokens(fast, ids)
                for row, name in enumerate(names):
                    assert_close(states[row], want[name][row], MODEL)
                    assert torch.equal(found[row], theirs[name][row])
    assert all(report.captured for report in moe_ops.generation_report(fast))


def test_gradients_are_those_on_a_cpu(adapted: tuple[Any, Choose]) -> None:
    model, chosen = adapted
    moe_ops.optimize(model)
    chosen(model, "one")
    parts = [(n, p) for n, p in model.named_parameters() if ".one." in n]
    found = []
    for device in ("cuda", "cpu"):
        model.to(device).zero_grad()
        for _, p in parts:
            p.requires_grad_(True)
        ids = ids_of().to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({n: p.grad.cpu() for n, p in parts if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 8
    for name, gradient in found[1].items():
        assert_close(found[0][name], gradient, MODEL, name)
