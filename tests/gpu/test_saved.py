"""Quantised models that `from_pretrained` puts on a GPU: every bit, and no memory besides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ops
from moe_ops.testing import Tol, assert_close
from tests.hf.test_quantize import SIZES
from tests.hf.test_quantized_linears import quantized as in_codes
from tests.hf.test_quantized_state import EVERY, quantized
from tests.hf.test_saved import check_same

pytestmark = pytest.mark.gpu
SHARD = 8 * 2**20


@torch.inference_mode()
def logits(model: Qwen3MoeForCausalLM) -> torch.Tensor:
    return model(input_ids=torch.arange(3, 15, device="cuda")[None], use_cache=False).logits


@pytest.mark.parametrize("scheme", EVERY)
def test_every_scheme_comes_back_on_the_gpu(scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = type(model).from_pretrained(tmp_path, device_map="cuda")
    assert {p.device.type for p in loaded.state_dict().values()} == {"cuda"}
    check_same(model, loaded.cpu())
    assert torch.equal(logits(loaded.cuda()), logits(model.cuda()))


def test_layers_in_codes_that_a_device_map_offloads(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = in_codes()
    model.save_pretrained(tmp_path)
    own = ("embed_tokens", "rotary_emb", "layers.0", "norm")
    places = {f"model.{name}": 0 for name in own} | {"model.layers.1": "cpu", "lm_head": "cpu"}
    loaded = type(model).from_pretrained(tmp_path, device_map=places)
    assert loaded.lm_head.weight_codes.is_meta
    assert loaded.model.layers[1].self_attn.q_proj.weight_codes.is_meta
    want = logits(model.cuda())
    for _ in range(2):
        assert_close(logits(loaded), want, Tol(1e-5, "float32 sums in another order"))


def test_no_more_memory_than_one_shard_is_needed(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 512, "num_hidden_layers": 4}
    config = Qwen3MoeConfig(
        num_experts=32, moe_intermediate_size=256, intermediate_size=64, dtype="bfloat16", **sizes
    )
    model = Qwen3MoeForCausalLM(config).bfloat16()
    moe_ops.quantize_model(model, "fp8_w8a16", progress=False)
    model.save_pretrained(tmp_path, max_shard_size=SHARD)
    del model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path, device_map="cuda", dtype="auto")
    held = sum(t.nbytes for t in loaded.state_dict().values())
    assert held > 6 * SHARD
    # transformers allocates all of it once before, to have it in its allocator.
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * held + SHARD
