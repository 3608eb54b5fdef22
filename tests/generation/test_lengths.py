"""Prompts of any length, and sequences of any number, share compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import moe_ops
from moe_ops import compiler
from tests.chosen import those_of
from tests.hf.auto_classes import build_published
from tests.hf.twins import check
from tests.recompiling import Traced

# By what they keep: a window, latents, the states of a delta rule and of Mamba2, of convolutions
# alone, an indexer's keys, and what an indexer scores by pools and by blocks.
NAMES = (
    "GptOssForCausalLM", "DeepseekV2ForCausalLM", "Qwen3NextForCausalLM", "NemotronHForCausalLM",
    "Lfm2MoeForCausalLM", "DeepseekV32ForCausalLM", "Glm5NextForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
)  # fmt: skip
LENGTHS = (40, 2, 9, 300, 700)


class After:
    """A criterion that ends sequences after so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full(ids.shape[:1], ids.shape[1] >= self.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", those_of(("NemotronHForCausalLM",), NAMES))
def test_nothing_is_compiled_after_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    # Dynamo's graphs are counted, which need no code.
    monkeypatch.setattr(compiler, "Net", Traced)
    model = build_published(name).model
    twin = moe_ops.compile(model)

    def generate(batch: int, length: int, pads: bool) -> None:
        ids = torch.randint(16, 90, (batch, length))
        mask = torch.ones_like(ids)
        mask[0, : length // 2 * pads] = 0
        # Of one number of slots, for which steps are compiled.
        how = {"max_new_tokens": 760 - length, "stopping_criteria": [After(length + 3)]}
        check(model, twin, ids, attention_mask=mask, **how)

    first, *others = LENGTHS
    for batch in (3, 2):
        for pads in (False, True):
            generate(batch, first, pads)
    counters.clear()
    for batch in (3, 4, 2):
        for length in others:
            for pads in (False, True):
                generate(batch, length, pads)
    assert counters["stats"]["unique_graphs"] == 0
    sizes = {(r.rows, r.slots) for r in moe_ops.generation_report(twin)}
    assert sizes == {(4, 1024), (2, 1024)}
