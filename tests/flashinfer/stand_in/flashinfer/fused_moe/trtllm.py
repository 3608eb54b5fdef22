"""TensorRT-LLM's generated kernels: rows shuffled, scales in tiles, 16-bit floats in blocks of 64
columns; float8 in blocks as it is, up before the gate.

Each family is two functions, of which one routes tokens itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashinfer.fused_moe.kinds import Fp8QuantizationType
from flashinfer.fused_moe.numbers import Layer, calls
from flashinfer.fused_moe.routing import routed
from flashinfer.fused_moe.shuffled import (
    finish,
    float4,
    float4_tokens,
    float8,
    float8_tokens,
    floats,
)
from flashinfer.signed import signed

Given = dict[str, Any]
Family = Callable[[Given], tuple[Layer, Tensor]]  # a layer, and the values of tokens
ROUTING = (
    "routing_logits", "routing_bias", "top_k", "n_group", "topk_group", "routed_scaling_factor",
    "routing_method_type",
)  # fmt: skip


def _function(name: str, family: Family) -> Callable[..., Any]:
    """A function of a family, which writes `output`. It is given ids and weights, or logits."""

    @signed(name)
    def function(**given: Any) -> Any:
        calls.append((name, given))
        layer, x = family(given)
        pairs = given["topk_ids"] if "topk_ids" in given else routed(*(given[n] for n in ROUTING))
        return finish(layer, x, pairs, given["local_expert_offset"], given["output"])

    return function


def _floats(given: Given) -> tuple[Layer, Tensor]:
    x, act = given["hidden_states"], given["activation_type"]
    return floats(x, given["gemm1_weights"], given["gemm2_weights"], act), x


def _float8(given: Given) -> tuple[Layer, Tensor]:
    assert given["num_experts"] % 4 == 0 and given["num_experts"] > given["top_k"]
    kind = Fp8QuantizationType(given["fp8_quantization_type"])
    x = float8_tokens(given["hidden_states"], given["hidden_states_scale"], kind)
    shuffled, act = given["use_shuffled_weight"], given["activation_type"]
    return float8(_weights(given), kind, shuffled, act), x


ABSENT = ("gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
FACTORS = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")


def _float4(given: Given) -> tuple[Layer, Tensor]:
    assert all(given[name] is None for name in ABSENT)
    up, gate, out = (given[name] for name in FACTORS)
    x, layout = given["hidden_states"], given["hidden_states_scale_layout"]
    layer = float4(_weights(given), (up, gate, out), x.dtype, given["activation_type"])
    return layer, float4_tokens(x, given["hidden_states_scale"], layout)


def _weights(given: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w1, w2 = given["gemm1_weights"], given["gemm2_weights"]
    return w1, given["gemm1_weights_scale"], w2, given["gemm2_weights_scale"]


trtllm_bf16_moe = _function("trtllm_bf16_moe", _floats)
trtllm_bf16_routed_moe = _function("trtllm_bf16_routed_moe", _floats)
trtllm_fp8_block_scale_moe = _function("trtllm_fp8_block_scale_moe", _float8)
trtllm_fp8_block_scale_routed_moe = _function("trtllm_fp8_block_scale_routed_moe", _float8)
trtllm_fp4_block_scale_moe = _function("trtllm_fp4_block_scale_moe", _float4)
trtllm_fp4_block_scale_routed_moe = _function("trtllm_fp4_block_scale_routed_moe", _float4)
