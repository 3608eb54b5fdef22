"""Tiny models with random weights, one for each kind of what layers keep from token to token."""

from __future__ import annotations

from typing import Any

import torch
import transformers

PLACE = 255  # the token in whose places a picture is

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
# Kinds by name: the configuration's class, and what it gets.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": (
        "GptOssConfig",
        {
            "num_local_experts": 8,
            "sliding_window": 32,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "latents": ("DeepseekV3Config", {**LATENTS, "first_k_dense_replace": 1}),
    "indexer": (
        "DeepseekV32Config",
        # With few heads scores are 0 in many places, and which of them are taken is chance.
        {
            **LATENTS,
            "mlp_layer_types": ["dense", "sparse"],
            "index_topk": 24,
            "index_head_dim": 32,
            "index_n_heads": 64,
        },
    ),
    "delta rule": (
        "Qwen3NextConfig",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "state space": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 32,
        },
    ),
    "pictures": ("Qwen3VLMoeConfig", {"num_local_experts": 8, "moe_intermediate_size": 32}),
}


def build(kind: str, device: str) -> Any:
    """A model of a kind in float32."""
    name, sizes = KINDS[kind]
    cls = getattr(transformers, name)
    own = {
        key: size
        for key, size in SIZES.items()
        if key != "num_hidden_layers" or "layers_block_type" not in sizes
    }
    own |= sizes
    if kind == "pictures":
        config = cls(text_config=own, vision_config=VISION, image_token_id=PLACE)
        auto = transformers.AutoModelForImageTextToText
    else:
        config, auto = cls(**own), transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # so large that no two tokens are all but equal
                weight.normal_(std=weight.shape[-1] ** -0.5)
    return model.to(device).eval()


def picture(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """What a model gets for a picture in each text, in four places from the fourth on, where this
    puts it."""
    ids[:, 3:7] = PLACE  # 4 x 4 patches, merged by 2 x 2
    vision = model.config.vision_config
    numbers = 3 * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": torch.randn(16 * len(ids), numbers, device=ids.device),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(ids), device=ids.device),
        "mm_token_type_ids": (ids == PLACE).int(),
    }
