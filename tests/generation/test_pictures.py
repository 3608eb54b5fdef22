"""Prompts with pictures: the model's encoder runs as it does without us, and then steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import utils as generation_utils

from tests.chosen import those_of
from tests.hf.auto_classes import build_published
from tests.hf.twins import check, twin_of

NAMES = (
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
)
PLACE = 90  # the token in whose places a picture is


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL"),
    reason="before 5.24 transformers encodes pictures in each forward that gets them",
)
@pytest.mark.parametrize("name", those_of(NAMES[:1], NAMES))
def test_tokens_are_stocks(name: str) -> None:
    model: Any = build_published(name).model
    vision, model.config.image_token_id = model.config.vision_config, PLACE
    twin = twin_of(model)
    ids = torch.randint(16, PLACE, (2, 12))
    ids[:, 3:7] = PLACE  # 4 x 4 patches, merged by 2 x 2
    patches = torch.randn(32, 3 * vision.temporal_patch_size * vision.patch_size**2)
    given = {
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == PLACE).int(),
    }
    tokens = check(model, twin, ids, **given)
    check(model, twin, ids, num_beams=2, **given)
    check(model, twin, ids, prefill_chunk_size=5, **given)
    assert not torch.equal(check(model, twin, ids, **given | {"pixel_values": -patches}), tokens)
    assert not twin._moe_ops_generation.told
