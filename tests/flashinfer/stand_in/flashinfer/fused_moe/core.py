"""What `cutlass_fused_moe` calls."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from flashinfer.fused_moe import cutlass
from flashinfer.fused_moe.kinds import ActivationType

ARCHITECTURES = ("90", "100", "103", "120")


def get_cutlass_fused_moe_module(
    backend: str = "100", use_fast_build: bool = False
) -> SimpleNamespace:
    """The functions of one architecture."""
    assert backend in ARCHITECTURES

    def cutlass_fused_moe(
        output: Tensor,
        input: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        fc1_expert_weights: Tensor,
        fc1_expert_biases: Tensor | None,
        fc2_expert_weights: Tensor,
        fc2_expert_biases: Tensor | None,
        output_dtype: torch.dtype,
        quant_scales: list[Tensor],
        input_sf: Tensor | None = None,
        swiglu_alpha: Tensor | None = None,
        swiglu_beta: Tensor | None = None,
        swiglu_limit: Tensor | None = None,
        clamped_relu2_limit: Tensor | None = None,
        situ_beta: Tensor | None = None,
        situ_linear_beta: Tensor | None = None,
        swizzled_input_sf: bool = True,
        tp_size: int = 1,
        tp_rank: int = 0,
        ep_size: int = 1,
        ep_rank: int = 0,
        cluster_size: int = 1,
        cluster_rank: int = 0,
        enable_alltoall: bool = False,
        use_deepseek_fp8_block_scale: bool = False,
        use_w4_group_scaling: bool = False,
        use_mxfp8_act_scaling: bool = False,
        min_latency_mode: bool = False,
        tune_max_num_tokens: int = 8192,
        enable_pdl: bool | None = None,
        activation_type: ActivationType = ActivationType.Swiglu,
        use_packed_weights: bool = False,
        use_fused_finalize: bool = True,
        use_wfp4afp8_humming: bool = False,
        profile_ids: list[int] | None = None,
        workspace_buffer: Tensor | None = None,
    ) -> list[Tensor]:
        """Writes `output`."""
        cutlass.run({**locals(), "backend": "cutlass"})
        return [output]

    return SimpleNamespace(cutlass_fused_moe=cutlass_fused_moe)
