"""Published sizes of MoE models, and these with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.initialization import no_init_weights


def qwen3(hidden_size: int, layers: int, heads: int, width: int) -> Qwen3MoeConfig:
    """A published Qwen3-MoE; `width` is that of an expert."""
    return Qwen3MoeConfig(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=width,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
    )


Configs = dict[str, Callable[..., Any]]
CONFIGS: Configs = {
    "qwen3-30b": lambda layers: qwen3(2048, layers or 48, 32, 768),
    "qwen3-235b": lambda layers: qwen3(4096, layers or 94, 64, 1536),
    "mixtral-8x7b": lambda layers: MixtralConfig(num_hidden_layers=layers or 32),
    "gpt-oss-20b": lambda layers: GptOssConfig(
        num_hidden_layers=layers or 24, num_local_experts=32
    ),
    "deepseek-v2-lite": lambda layers: DeepseekV2Config(
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers or 27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        first_k_dense_replace=1,
        num_experts_per_tok=6,
    ),
    # Its widths, as many experts as fit, no dense layer.
    "deepseek-v3-64": lambda layers: DeepseekV3Config(
        num_hidden_layers=layers or 4, n_routed_experts=64, first_k_dense_replace=0
    ),
    "glm-4.7-flash": lambda layers: Glm4MoeLiteConfig(
        num_hidden_layers=layers or 47,
        mlp_layer_types=["dense"] + ["sparse"] * ((layers or 47) - 1),
    ),
    "qwen3-next-80b": lambda layers: Qwen3NextConfig(num_hidden_layers=layers or 48),
    "qwen3.6-35b": lambda layers: Qwen3_5MoeTextConfig(num_hidden_layers=layers or 40),
    "glm-4.5-air": lambda layers: Glm4MoeConfig(
        num_hidden_layers=layers or 46, head_dim=128, attention_bias=True
    ),
    "olmoe": lambda layers: OlmoeConfig(
        num_hidden_layers=layers or 16, intermediate_size=1024, norm_topk_prob=False
    ),
    "tiny": lambda layers: Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=layers or 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=256,
    ),
}


def build(name: str, layers: int | None, device: str) -> Any:
    """The model on its device in bfloat16, its weights small normal values."""
    config = CONFIGS[name](layers)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(dtype)
    for key, weight in model.named_parameters():
        if key.endswith("bias"):
            weight.data.zero_()
        elif weight.dim() == 1:
            weight.data.fill_(1)
        else:
            weight.data.normal_(std=0.02)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
