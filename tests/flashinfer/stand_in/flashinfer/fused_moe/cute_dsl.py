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
from flashinfer.signed import signed


class CuteDslBf16MoEWrapper:
    @signed("CuteDslBf16MoEWrapper.__init__")
    def __init__(self, **given: Any) -> None:
        calls.append(("CuteDslBf16MoEWrapper", given))
        self.kind = ActivationType(given["activation_type"]).name
        self.experts = given["num_local_experts"] or given["num_experts"]
        self.offset, self.held = given["local_expert_offset"], Held()

    @signed("CuteDslBf16MoEWrapper.run")
    def run(
        self,
        x: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        w1_weight: Tensor,
        w2_weight: Tensor,
        **others: object,
    ) -> Tensor:
        assert w1_weight.shape[0] == self.experts
        require_dense(x, w1_weight, w2_weight)
        w1 = w1_weight if self.kind == "Relu2" else unchunked(w1_weight, 32)
        layer = Layer(w1.float(), w2_weight.float(), self.kind)
        out = layer.run(x, token_selected_experts, token_final_scales, self.offset)
        return self.held.write(out).to(x.dtype)


class CuteDslMoEWrapper:
    @signed("CuteDslMoEWrapper.__init__")
    def __init__(self, **given: Any) -> None:
        calls.append(("CuteDslMoEWrapper", given))
        self.kind = ActivationType(given["activation_type"]).name
        self.offset, self.dtype = given["local_expert_offset"], given["output_dtype"]
        self.held = Held()

    @signed("CuteDslMoEWrapper.run")
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
        **others: object,
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
