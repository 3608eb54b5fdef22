"""TensorRT-LLM's generated kernels: rows shuffled, scales in tiles, 16-bit floats in blocks of 64
columns; float8 in blocks as it is, up before the gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashinfer.fused_moe.kinds import ActivationType, Fp8QuantizationType, SfLayout
from flashinfer.fused_moe.routing import routed
from flashinfer.fused_moe.shuffled import (
    called,
    finish,
    float4,
    float4_tokens,
    float8,
    float8_tokens,
    floats,
)


def trtllm_bf16_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = 2,
    do_finalize: bool = True,
    enable_pdl: bool = True,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
    norm_topk_prob: bool = True,
    routing_replay_out: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    output: Tensor | None = None,
) -> Any:
    """Writes `output`."""
    called("trtllm_bf16_moe", locals())
    layer = floats(hidden_states, gemm1_weights, gemm2_weights, activation_type)
    ids, weights = routed(
        routing_logits, routing_bias, top_k, n_group, topk_group, routed_scaling_factor,
        routing_method_type,
    )  # fmt: skip
    return finish(layer, hidden_states, (ids, weights), local_expert_offset, output)


def trtllm_bf16_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = 2,
    do_finalize: bool = True,
    enable_pdl: bool = True,
    gemm1_lora_delta: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
    routing_replay_out: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    output: Tensor | None = None,
) -> Any:
    """Writes `output`."""
    called("trtllm_bf16_routed_moe", locals())
    layer = floats(hidden_states, gemm1_weights, gemm2_weights, activation_type)
    return finish(layer, hidden_states, topk_ids, local_expert_offset, output)


def trtllm_fp8_block_scale_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: Fp8QuantizationType = Fp8QuantizationType.DeepSeekFp8,
    num_fused_shared_experts: int | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    norm_topk_prob: bool = True,
    routing_replay_out: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    output: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    *,
    gemm1_bias: Tensor | None = None,
    gemm2_bias: Tensor | None = None,
) -> Any:
    """Writes `output`."""
    called("trtllm_fp8_block_scale_moe", locals())
    assert num_experts % 4 == 0 and num_experts > top_k
    weights = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale)
    kind = Fp8QuantizationType(fp8_quantization_type)
    layer = float8(weights, kind, use_shuffled_weight, activation_type)
    x = float8_tokens(hidden_states, hidden_states_scale, kind)
    ids, chosen = routed(
        routing_logits, routing_bias, top_k, n_group, topk_group, routed_scaling_factor,
        routing_method_type,
    )  # fmt: skip
    return finish(layer, x, (ids, chosen), local_expert_offset, output)


def trtllm_fp8_block_scale_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: Fp8QuantizationType = Fp8QuantizationType.DeepSeekFp8,
    activation_type: int = ActivationType.Swiglu.value,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> Any:
    """Writes `output`."""
    called("trtllm_fp8_block_scale_routed_moe", locals())
    assert num_experts % 4 == 0 and num_experts > top_k
    weights = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale)
    kind = Fp8QuantizationType(fp8_quantization_type)
    layer = float8(weights, kind, use_shuffled_weight, activation_type)
    x = float8_tokens(hidden_states, hidden_states_scale, kind)
    return finish(layer, x, topk_ids, local_expert_offset, output)


def trtllm_fp4_block_scale_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm1_bias: Tensor | None,
    gemm1_alpha: Tensor | None,
    gemm1_beta: Tensor | None,
    gemm1_clamp_limit: Tensor | None,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    gemm2_bias: Tensor | None,
    output1_scale_scalar: Tensor | None,
    output1_scale_gate_scalar: Tensor | None,
    output2_scale_scalar: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    per_token_scale: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: Tensor | None = None,
    num_fused_shared_experts: int | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> Any:
    """Writes `output`."""
    called("trtllm_fp4_block_scale_moe", locals())
    assert gemm1_bias is gemm2_bias is gemm1_alpha is gemm1_beta is gemm1_clamp_limit is None
    weights = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale)
    factors = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    layer = float4(weights, factors, hidden_states.dtype, activation_type)
    x = float4_tokens(hidden_states, hidden_states_scale, hidden_states_scale_layout)
    ids, chosen = routed(
        routing_logits, routing_bias, top_k, n_group, topk_group, routed_scaling_factor,
        routing_method_type,
    )  # fmt: skip
    return finish(layer, x, (ids, chosen), local_expert_offset, output)


def trtllm_fp4_block_scale_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm1_bias: Tensor | None,
    gemm1_alpha: Tensor | None,
    gemm1_beta: Tensor | None,
    gemm1_clamp_limit: Tensor | None,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    gemm2_bias: Tensor | None,
    output1_scale_scalar: Tensor | None,
    output1_scale_gate_scalar: Tensor | None,
    output2_scale_scalar: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    per_token_scale: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> Any:
    """Writes `output`."""
    called("trtllm_fp4_block_scale_routed_moe", locals())
    assert gemm1_bias is gemm2_bias is gemm1_alpha is gemm1_beta is gemm1_clamp_limit is None
    weights = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale)
    factors = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    layer = float4(weights, factors, hidden_states.dtype, activation_type)
    x = float4_tokens(hidden_states, hidden_states_scale, hidden_states_scale_layout)
    return finish(layer, x, topk_ids, local_expert_offset, output)
