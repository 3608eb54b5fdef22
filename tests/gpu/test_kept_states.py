"""Captured steps of layers that keep more than keys and values: stock's tokens, and chats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.forward.layer_cache import CACHE
from moe_ops.graphs.runner import TIMES
from tests.hf import families
from tests.hf.auto_classes import build_text
from tests.hf.twins import PLAIN, check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
# The delta rule, Mamba2, a convolution, one of each beside attention, an indexer, pictures.
FAMILIES = ("qwen3_next", "nemotron_h", "lfm2_moe", "zaya", "deepseek_v32", "qwen3_vl_moe")


def chat(model: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    ids, kwargs, said = torch.randint(16, 90, (2, 9), device="cuda"), {}, []
    for more in (5, 1, 3):
        out = model.generate(ids, return_dict_in_generate=True, **PLAIN, **kwargs)
        kwargs = {CACHE: out[CACHE]}
        said.append(out.sequences)
        ids = torch.cat([out.sequences, torch.randint(16, 90, (2, more), device="cuda")], 1)
    return said


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_and_prompts_are_captured(family: str) -> None:
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    model = build_text(family).model.cuda()
    twin = moe_ops.compile(model)
    for pad in range(TIMES + 1):
        ids = torch.randint(16, 90, (3, 11), device="cuda")
        mask = torch.ones_like(ids)
        mask[0, : pad + 1] = 0
        check(model, twin, ids)
        check(model, twin, ids, attention_mask=mask)
        check(model, twin, ids[:2], num_beams=2)
    assert all(map(torch.equal, chat(twin), chat(model)))
    reports = moe_ops.generation_report(twin)
    assert all(r.captured for r in reports), [r.refusal for r in reports]
    assert any(r.prompts_replayed for r in reports)
    assert not twin._moe_ops_generation.told
