"""Models at the widths that users have: few experts, few layers and random weights keep them cheap.

Compiled code takes other ways at real widths than at 64: Inductor splits reductions, merges loops
and fuses otherwise. A count that a table here does not name is the default of the family's config.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from tests.hf import families
from tests.hf.overrides import OVERRIDES, SIZES

LAYERS = 6
# Generation of Qwen3-Next compiles whole models, with linear attention in the first layer of three:
# the four checks of six layers are 480 s of compiling on one core, those of three 235 s.
FEWER_LAYERS = {"qwen3_next": 3}
EXPERTS = 8
VOCAB = 2048
FIRST_PLAIN_TOKEN = 16  # ids below may mean padding, end of text, or an image

# Counts, which cost time and memory and lead to no other code.
COUNTS: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# Published widths of twelve families, by name of the config's fields.
WIDTHS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {  # DeepSeek-V2-Lite
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "n_shared_experts": 2, "topk_method": "greedy",
    },
    "deepseek_v3": {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    },
    "ernie4_5_moe": {  # ERNIE-4.5-21B-A3B
        "hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": EXPERTS,
        "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    },
    "glm4_moe": {  # GLM-4.5-Air
        "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "n_shared_experts": 1, "attention_bias": True, "use_qk_norm": False,
    },
    "gpt_oss": {  # gpt-oss-20b and 120b
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64,
    },
    "granitemoeshared": {
        "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024,
        "num_attention_heads": 24, "num_key_value_heads": 8,
    },
    "mixtral": {  # Mixtral-8x7B
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "olmoe": {  # OLMoE-1B-7B
        "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "phimoe": {  # Phi-3.5-MoE
        "hidden_size": 4096, "intermediate_size": 6400, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2_moe": {  # Qwen1.5-MoE-A2.7B
        "hidden_size": 2048, "moe_intermediate_size": 1408, "intermediate_size": 5632,
        "shared_expert_intermediate_size": 5632, "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "qwen3_moe": {  # Qwen3-30B-A3B
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True,
    },
    "qwen3_next": {  # Qwen3-Next-80B-A3B, where three of four layers attend linearly
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    },
}  # fmt: skip

# fmt: off
# What a config needs where a default is None, or has no experts, by name of the config's class.
NEEDED: dict[str, dict[str, Any]] = {
    "DeepseekOcr2TextConfig": {  # its default width of 1407 is for no grouped product of torch
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1), "moe_intermediate_size": 896,
    },
    "DiffusionGemmaTextConfig": {"moe_intermediate_size": 704, "top_k_experts": 2},
    "Dots1Config": {"n_shared_experts": 2},
    "Gemma4TextConfig": {"moe_intermediate_size": 704, "top_k_experts": 2},
    "Glm4vMoeTextConfig": {"head_dim": 128},
    "HunYuanMoEV1Config": {"head_dim": 128},
    "MuseSparkAudioConfig": OVERRIDES["MuseSparkAudioConfig"] | {"num_hidden_layers": 2},
    "Qwen3OmniMoeTextConfig": {  # Qwen3-Omni-30B-A3B
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "moe_intermediate_size": 768,
    },
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256,
        "indexer_budget": 2048, "indexer_compress_ratio": 32,
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
}
# fmt: on
SWITCHES = ("enable_moe_block", "router_jitter_noise", "vision_start_token_id", "vision_config")
LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")


def build(
    family: str, *, device: str, dtype: torch.dtype, layers: int | None = None
) -> PreTrainedModel:
    """A model of the family with real widths and random weights, in eval mode; of `LAYERS`, or
    `FEWER_LAYERS`, unless told.

    Fake tensors stay as they are: they have no values.
    """
    cls, sizes = families.model_class(family), config(family, layers)
    if detect_fake_mode() is None:
        model = _made(cls, sizes, device, dtype)
        families.randomise(model, seed=0)
        model.generation_config.eos_token_id = None
    else:
        with unset_fake_temporarily():  # models cast their parts, which fake parameters refuse
            model = _made(cls, sizes, "meta", dtype)
        model.to_empty(device=device)
    return model.eval()


def _made(
    cls: type[PreTrainedModel], sizes: PreTrainedConfig, device: str, dtype: torch.dtype
) -> PreTrainedModel:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), no_init_weights():
            return cls(sizes)
    finally:
        torch.set_default_dtype(before)


def config(family: str, layers: int | None = None) -> PreTrainedConfig:
    """A config of the family with real widths, few experts and so many layers."""
    layers = layers or FEWER_LAYERS.get(family, LAYERS)
    return _config(families.model_class(family).config_class, family, layers)


def _config(config_class: type[PreTrainedConfig], family: str, layers: int) -> PreTrainedConfig:
    declared = {field.name for field in dataclasses.fields(config_class)}
    wanted = {**SIZES, **COUNTS, "num_hidden_layers": layers, "mlp_layer_types": None}
    counts = {name: value for name, value in wanted.items() if name in declared & COUNTS.keys()}
    for name, value in OVERRIDES.get(config_class.__name__, {}).items():
        if name in LAYER_LISTS:
            counts[name] = (value * layers)[:layers]
        elif name in SWITCHES:
            counts[name] = value
    counts |= NEEDED.get(config_class.__name__, {})
    widths = {k: v for k, v in WIDTHS.get(family, {}).items() if k in declared}
    widths |= {k: (widths[k] * layers)[:layers] for k in LAYER_LISTS if k in widths}
    for name, value in vars(config_class(**counts | widths)).items():
        if isinstance(value, PreTrainedConfig):
            counts[name] = _config(type(value), family, layers)
    return config_class(**counts | widths)
