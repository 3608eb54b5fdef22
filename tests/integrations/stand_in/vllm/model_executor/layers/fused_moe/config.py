"""What a layer is, and how it is split over ranks."""

from dataclasses import dataclass, field

import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation


@dataclass
class FusedMoEParallelConfig:
    tp_size: int = 1
    pcp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    ep_rank: int = 0
    sp_size: int = 1
    enable_eplb: bool = False


@dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    activation: MoEActivation
    in_dtype: torch.dtype = torch.float32
    has_bias: bool = False
    is_lora_enabled: bool = False
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)

    @property
    def is_act_and_mul(self):
        return self.activation.is_gated
