"""The functions and wrappers of FlashInfer that moe_ops calls."""

from __future__ import annotations

from flashinfer.fused_moe.b12x import B12xMoEWrapper
from flashinfer.fused_moe.cute_dsl import CuteDslBf16MoEWrapper, CuteDslMoEWrapper
from flashinfer.fused_moe.cutlass import cutlass_fused_moe, cutlass_fused_moe_workspace_size
from flashinfer.fused_moe.kinds import ActivationType, Fp8QuantizationType, RoutingMethodType
from flashinfer.fused_moe.trtllm import (
    trtllm_bf16_moe,
    trtllm_bf16_routed_moe,
    trtllm_fp4_block_scale_moe,
    trtllm_fp4_block_scale_routed_moe,
    trtllm_fp8_block_scale_moe,
    trtllm_fp8_block_scale_routed_moe,
)

__all__ = [
    "ActivationType",
    "B12xMoEWrapper",
    "CuteDslBf16MoEWrapper",
    "CuteDslMoEWrapper",
    "Fp8QuantizationType",
    "RoutingMethodType",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
]
