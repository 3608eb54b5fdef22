"""Whether a model of transformers runs on what a checkpoint of its own family holds."""

from __future__ import annotations

import torch
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts

import moe_ops
from moe_ops.hf import adopt_mxfp4
from moe_ops.hf.fp8 import describe_fp8

SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2,
}  # fmt: skip


def qwen() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=64)


@torch.no_grad()
def floats() -> str | None:
    """By `optimize`, with the logits of transformers."""
    model = Qwen3MoeForCausalLM(qwen()).eval()
    ids = torch.arange(5)[None]
    want = model(ids).logits
    moe_ops.optimize(model)
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
    return None


def fp8_blocks() -> str | None:
    """By `optimize`, if the op expresses transformers' own experts of this kind."""
    module = FP8Experts(qwen(), block_size=(32, 32))
    module.has_gate, module.has_bias, module.is_transposed = True, False, False
    found = describe_fp8(module)
    return found if isinstance(found, str) else None


@torch.no_grad()
def mxfp4() -> str | None:
    """By `adopt_mxfp4`."""
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=3)).eval()
    tensors = {}
    for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
        key = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{key}_blocks"] = torch.randint(256, (3, rows, 2, 16), dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(120, 124, (3, rows, 2), dtype=torch.uint8)
    if adopt_mxfp4(model, tensors) != 1 or not model(torch.arange(5)[None]).logits.isfinite().all():
        return "the model does not run on it"
    return None
