"""TensorRT-LLM's generated kernels: rows shuffled, in blocks of 64 columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashinfer.fused_moe.kinds import ActivationType
from flashinfer.fused_moe.numbers import Held, Layer, calls, require_dense, unchunked


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
    calls.append(("trtllm_bf16_routed_moe", {**locals()}))
    assert isinstance(topk_ids, tuple) and output is not None
    require_dense(hidden_states, gemm1_weights, gemm2_weights, output)
    kind = ActivationType(activation_type).name
    w1 = _unblocked(gemm1_weights)
    w1 = w1 if kind == "Relu2" else unchunked(w1, 1)
    layer = Layer(w1.float(), _unblocked(gemm2_weights).float(), kind)
    output.copy_(scratch.write(layer.run(hidden_states, *topk_ids, local_expert_offset)))
    return output


scratch = Held()  # of the runner that all layers of a process share


def _unblocked(w: Tensor) -> Tensor:
    """[E, rows, columns] from blocks [E, columns / 64, rows, 64] of rows shuffled by 32."""
    assert w.shape[3] == 64 and w.dtype == torch.bfloat16
    plain = w.permute(0, 2, 1, 3).flatten(2)
    old = torch.arange(plain.shape[1])
    return plain[:, old // 32 * 32 + old % 4 * 8 + old % 32 // 4]
