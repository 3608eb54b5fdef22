"""Tiny sizes for transformers configurations, as data.

`SIZES` is keyed by the name of a config field and applies wherever a config class declares it.
`OVERRIDES` is keyed by the name of a config class and holds what the general rule gets wrong there:
sizes which a class ties together, and switches which its defaults leave off (a family whose experts
would not be built, or whose routing would be trivial).
"""

from typing import Any

HIDDEN = 32
INTERMEDIATE = 48
MOE_INTERMEDIATE = 16
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
EXPERTS = 8
TOP_K = 2
VOCAB = 99
RANK = 16
SCALE = 1.5

SIZES: dict[str, Any] = {
    # Residual stream and feed-forward.
    "hidden_size": HIDDEN,
    "out_hidden_size": HIDDEN,
    "text_hidden_size": HIDDEN,
    "projector_hidden_size": HIDDEN,
    "projection_hidden_dim": HIDDEN,
    "adapter_in_dim": HIDDEN,
    "adapter_input_size": HIDDEN,
    "adapter_out_dim": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "dense_intermediate_size": INTERMEDIATE,
    "projection_intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": MOE_INTERMEDIATE,
    "moe_hidden_size": RANK,
    "moe_latent_size": RANK,
    "moe_shared_expert_intermediate_size": MOE_INTERMEDIATE,
    "shared_expert_intermediate_size": MOE_INTERMEDIATE,
    "shared_experts_intermediate_size": MOE_INTERMEDIATE,
    "shared_intermediate_size": MOE_INTERMEDIATE,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": HEAD_DIM,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Attention.
    "num_attention_heads": HEADS,
    "num_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "q_lora_rank": RANK,
    "kv_lora_rank": RANK,
    "o_lora_rank": RANK,
    "o_groups": 2,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "index_head_dim": 2 * HEAD_DIM,
    "index_n_heads": HEADS,
    "index_topk": 4,
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": KV_HEADS,
    "swa_head_dim": HEAD_DIM,
    "d_rel": 4,
    "rel_extent": 32,
    "hc_mult": 2,
    "hc_count": 2,
    "hc_lowrank": RANK,
    # Linear attention and state space layers.
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": HEADS,
    "linear_head_dim": HEAD_DIM,
    "linear_num_heads": HEADS,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": HEAD_DIM,
    "mamba_chunk_size": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    # Experts. Scales differ from 1 so that an implementation which drops them is found out.
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "top_k_experts": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "routed_scaling_factor": SCALE,
    "moe_routed_scaling_factor": SCALE,
    "router_scaling_factor": SCALE,
    "route_scale": SCALE,
    "swiglu_limit": 1.0,
    # Layer 0 dense, layer 1 sparse, where a family can mix them.
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_layer_types": ["dense", "sparse"],
    # Vision and audio towers, which text inputs never reach.
    "depth": 2,
    "image_size": 56,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": [0],
    "output_channels": HEAD_DIM,
    "downsample_channels": [HEAD_DIM, HIDDEN],
    "mlp_dim": INTERMEDIATE,
    "downsample_hidden_size": HEAD_DIM,
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": INTERMEDIATE,
    "d_model": HIDDEN,
    "output_dim": HIDDEN,
    "canvas_length": 7,
}

_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}

OVERRIDES: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": _LINEAR_THEN_FULL,
    "Cohere2MoeConfig": {"logit_scale": 1.0},
    "DeepseekV2Config": {"topk_method": "group_limited_greedy"},
    "DeepseekV4Config": {
        "head_dim": 2 * HEAD_DIM,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
    },
    "DiffusionGemmaConfig": {  # 5.17 has no default for a tower which it needs
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_DIM,
            "position_embedding_size": 16,
        }
    },
    "DiffusionGemmaTextConfig": _SLIDING_THEN_FULL,
    "Dots3NoteTextConfig": {
        "layer_types": ["indexed_attention"] * 2,
        "head_dim": 2 * HEAD_DIM,
    },
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [MOE_INTERMEDIATE, MOE_INTERMEDIATE // 2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "FlintConfig": {"mlp_only_layers": [0]},
    "Gemma4TextConfig": _SLIDING_THEN_FULL | {"enable_moe_block": True},
    "Glm4vMoeTextConfig": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        }
    },
    "Glm5NextTextConfig": _LINEAR_THEN_FULL | {"qk_rope_head_dim": 0, "index_kpool": 2},
    "GraniteMoeHybridConfig": _LINEAR_THEN_FULL,
    "HYV4VLTextConfig": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
        }
    },
    "InklingTextConfig": {"n_shared_experts": 2, "logits_mup_width_multiplier": 1.0},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearConfig": _LINEAR_THEN_FULL,
    "LagunaConfig": {"moe_router_logit_softcapping": 5.0},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Llama4TextConfig": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": INTERMEDIATE,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
    "MuseSparkAudioConfig": {"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
    "MuseSparkTextConfig": {"output_multiplier": 0.75},
    "NemotronHConfig": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "PhimoeConfig": {"router_jitter_noise": 0.3},  # at its default nearly all weights are 1
    "Qwen3NextConfig": _LINEAR_THEN_FULL,
    "RadioConfig": {"video_temporal_patch_size": 2},
    "Qwen3_5MoeTextConfig": _LINEAR_THEN_FULL,
    "Qwen4ExpTextConfig": _LINEAR_THEN_FULL,
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 151652},  # only checkpoints have it
    "ZayaConfig": {"num_experts_per_tok": 1, "router_hidden_size": RANK},
}

# Where the general choice finds a class which takes no token ids, or only half of the model.
MODEL_CLASSES: dict[str, str] = {
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}

# Inputs of the shape of `input_ids` which a family needs as well, with exclusive upper bounds.
EXTRA_INPUTS: dict[str, dict[str, int]] = {
    "diffusion_gemma": {"decoder_input_ids": VOCAB},
    "ernie4_5_vl_moe": {"moe_mm_token_type_ids": 2},  # 0 goes to text experts, 1 to vision experts
}

# Families which no tiny configuration builds, with the reason. An entry which builds fails a test.
UNBUILDABLE: dict[str, str] = {}
