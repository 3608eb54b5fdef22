"""Captured steps of several tokens, which check candidates: stock's tokens, and their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import using
from moe_ops.decode_ops.one_query import formula, one_query
from moe_ops.testing import BF16, Tol, assert_close
from tests.hf import families
from tests.hf.auto_classes import build_text
from tests.hf.twins import PLAIN, check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral", "deepseek_v32", "gemma4")
TOL = Tol(1.6e-2, "weights and outputs rounded to 8 bits of mantissa")
# Queries of a sequence, sequences, heads, heads of the cache, slots, head size.
SIZES = [(8, 1, 32, 4, 1024, 128), (5, 1, 64, 8, 4096, 64), (3, 2, 8, 8, 300, 128)]


def repeating() -> Tensor:
    ids = torch.randint(16, 90, (1, 9), device="cuda")
    return torch.cat([ids, ids[:, :5]], 1)


def drafting(family: str) -> Any:
    model = build_text(family).model.cuda()
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.assistant_confidence_threshold = 0
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_stocks_and_steps_captured(family: str) -> None:
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    model, draft = build_text(family).model.cuda(), drafting(family)
    twin, compiled = moe_ops.compile(model), moe_ops.compile(drafting(family))
    more = {**PLAIN, "max_new_tokens": 24}
    for tokens in (2, 3, 5):
        check(model, twin, repeating(), prompt_lookup_num_tokens=tokens, **more)
        check(model, twin, repeating(), assistant_model=draft, **more)
        ids = repeating()
        want = model.generate(ids, **more)
        assert torch.equal(twin.generate(ids, assistant_model=compiled, **more), want)
    for made in (twin, compiled):
        reports = moe_ops.generation_report(made)
        assert all(r.captured and all(w.captured for w in r.wide) for r in reports), reports
        assert any(w.steps > 1 for r in reports for w in r.wide)
        assert not made._moe_ops_generation.told


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_queries_that_share_a_sequence(size: tuple[int, ...], sinks: bool) -> None:
    W, C, H, N, S, D = size
    q = torch.randn(C * W, H, D, device="cuda", dtype=BF16)
    k, v = torch.randn(2, C, N, S, D, device="cuda", dtype=BF16)
    filled = S // 2 + torch.arange(C * W, device="cuda")[:, None] % W
    mask = torch.arange(S, device="cuda") <= filled
    sinks_H = torch.randn(H, device="cuda", dtype=BF16) if sinks else None
    want = formula(*(x.double() for x in (q, k, v)), mask, 0.09, sinks_H)
    k[:, :, S // 2 + W :] = v[:, :, S // 2 + W :] = float("nan")
    with using("triton", "one_query"):
        got = one_query(q, k, v, mask, 0.09, sinks_H)
    assert_close(got.float(), want.float(), TOL, str(size))
