"""CuTe DSL: rows of up and gate in turn; scales as an MMA view; global ids and an offset."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashinfer.fused_moe.kinds import ActivationType
from flashinfer.fused_moe.numbers import (
    Held,
    Layer,
    calls,
    fp4_values,
    require_dense,
    scales_of_mma,
    through_nvfp4,
    unchunked,
)


class CuteDslBf16MoEWrapper:
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        num_local_experts: int | None = None,
        local_expert_offset: int = 0,
        output_dtype: torch.dtype = torch.bfloat16,
        enable_pdl: bool = True,
        use_fused_finalize: bool = True,
        activation_type: int = ActivationType.Swiglu.value,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
        swiglu_limit: float = float("inf"),
        situ_beta: float | None = None,
        situ_linear_beta: float | None = None,
    ) -> None:
        calls.append(("CuteDslBf16MoEWrapper", {**locals()}))
        self.kind, self.offset = ActivationType(activation_type).name, local_expert_offset
        self.experts, self.held = num_local_experts or num_experts, Held()

    def run(
        self,
        x: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        w1_weight: Tensor,
        w2_weight: Tensor,
        tactic: tuple[Any, ...] | None = None,
        moe_output: Tensor | None = None,
        intermediate_buffer: Tensor | None = None,
    ) -> Tensor:
        assert w1_weight.shape[0] == self.experts
        require_dense(x, w1_weight, w2_weight)
        w1 = w1_weight if self.kind == "Relu2" else unchunked(w1_weight, 32)
        layer = Layer(w1.float(), w2_weight.float(), self.kind)
        out = layer.run(x, token_selected_experts, token_final_scales, self.offset)
        return self.held.write(out).to(x.dtype)


class CuteDslMoEWrapper:
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        use_cuda_graph: bool = False,
        max_num_tokens: int | None = None,
        num_local_experts: int | None = None,
        local_expert_offset: int = 0,
        tile_size: int = 128,
        sf_vec_size: int = 16,
        output_dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        enable_pdl: bool = True,
        activation_type: int = ActivationType.Swiglu.value,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
        swiglu_limit: float = float("inf"),
        situ_beta: float | None = None,
        situ_linear_beta: float | None = None,
        use_fused_finalize: bool = True,
        quant_mode: str = "w4a4",
    ) -> None:
        calls.append(("CuteDslMoEWrapper", {**locals()}))
        self.kind, self.offset = ActivationType(activation_type).name, local_expert_offset
        self.dtype, self.held = output_dtype, Held()

    def run(
        self,
        x: Tensor,
        x_sf: Tensor | None,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        w1_weight: Tensor,
        w1_weight_sf: Tensor,
        w1_alpha: Tensor,
        fc2_input_scale: Tensor | None,
        w2_weight: Tensor,
        w2_weight_sf: Tensor,
        w2_alpha: Tensor,
        tactic: tuple[Any, ...] | None = None,
        *,
        per_token_scale: Tensor | None = None,
    ) -> Tensor:
        assert x_sf is not None and fc2_input_scale is not None
        require_dense(x, w1_weight, w2_weight)
        w1 = decoded(w1_weight, w1_weight_sf, w1_alpha)
        w2 = decoded(w2_weight, w2_weight_sf, w2_alpha)
        w1 = w1 if self.kind == "Relu2" else unchunked(w1, 64)
        tokens = fp4_values(x) * x_sf.float().repeat_interleave(16, -1)
        layer = Layer(w1, w2, self.kind, second=through_nvfp4(fc2_input_scale))
        out = layer.run(tokens, token_selected_experts, token_final_scales, self.offset)
        return self.held.write(out).to(self.dtype)


def decoded(w: Tensor, view: Tensor, factors: Tensor) -> Tensor:
    """Weights times the factors of their experts."""
    assert factors.shape == w.shape[:1] and factors.dtype == torch.float32
    scales = scales_of_mma(view, w.shape[1], w.shape[2] // 8).float()
    return fp4_values(w) * scales.repeat_interleave(16, -1) * factors[:, None, None]
