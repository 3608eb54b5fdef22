"""Models over ranks in batch invariant graphs: prompts and steps have the bits of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from tests.distributed.ranks import processes
from tests.distributed.test_invariant import same
from tests.distributed.test_transformers import WIDE, make

STEPS = 5


def generated(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that a model makes, and the logits of each, [B, STEPS, vocabulary]."""
    made = model.generate(
        ids, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return made.sequences, torch.stack(made.logits, 1).float()


def over_ranks(rank: int, group: str, family: str, how: dict[str, str], quantized: bool) -> None:
    """Two ranks against one process, given the same sequences: what is not ours sees as many."""
    whole = make(family, WIDE)
    ids = torch.randint(64, (4, 5), generator=torch.Generator().manual_seed(0))
    mine = ids if not how else ids[2 * rank : 2 * rank + 2]
    shared = moe_ops.share_experts(copy.deepcopy(whole), group, **how)
    if quantized:
        for model in (whole, shared):
            moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    found = []
    for model in (whole, shared):
        torch._dynamo.reset()
        found.append(generated(moe_ops.compile(model, batch_invariant=True), mine))
    (tokens, logits), (got_tokens, got_logits) = found
    assert torch.equal(got_tokens, tokens)
    assert same(got_logits, logits)


WAYS: dict[str, dict[str, str]] = {
    "replicated": {}, "own": {"tokens": "own"},
    "own_exchange": {"tokens": "own", "collective": "exchange"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("family", "quantized"), [("qwen3_moe", False), ("qwen3_moe", True)], ids=["floats", "int8"]
)
def test_steps_of_models_have_the_bits_of_one_process(
    family: str, quantized: bool, how: dict[str, str], tmp_path: Path
) -> None:
    processes(2, tmp_path, over_ranks, family, how, quantized)
