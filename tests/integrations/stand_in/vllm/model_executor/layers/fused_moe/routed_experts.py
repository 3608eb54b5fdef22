"""The weights of a layer's experts that are on one rank."""

import torch
from torch import nn

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


class RoutedExperts(nn.Module):
    def __init__(
        self,
        layer_name,
        params_dtype,
        moe_config,
        swiglu_limit=None,
        swiglu_alpha=None,
        swiglu_beta=None,
        apply_router_weight_on_input=False,
    ):
        super().__init__()
        self.layer_name, self.moe_config = layer_name, moe_config
        self.activation = moe_config.activation
        self.swiglu_limit, self.swiglu_alpha = swiglu_limit, swiglu_alpha
        self.swiglu_beta = swiglu_beta
        self.apply_router_weight_on_input = apply_router_weight_on_input
        parallel = moe_config.moe_parallel_config
        self.first, here = 0, moe_config.num_experts // parallel.ep_size
        self._expert_map = None
        if parallel.ep_size > 1:
            self.first = parallel.ep_rank * here
            self._expert_map = torch.full((moe_config.num_experts,), -1, dtype=torch.int32)
            self._expert_map[self.first : self.first + here] = torch.arange(here).int()
        self.quant_method = UnquantizedFusedMoEMethod(moe_config)
        if parallel.enable_eplb and not self.quant_method.supports_eplb:
            raise NotImplementedError(f"EPLB is not supported {type(self.quant_method).__name__}.")
        self.quant_method.create_weights(
            layer=self,
            num_experts=here,
            hidden_size=moe_config.hidden_dim,
            unpadded_hidden_size=moe_config.hidden_dim,
            intermediate_size_per_partition=moe_config.intermediate_size // parallel.tp_size,
            params_dtype=params_dtype,
            weight_loader=self.load,
            global_num_experts=moe_config.num_experts,
        )

    @property
    def expert_map(self):
        return self._expert_map

    def load(self, **weights):
        """Whole weights: this rank takes its experts, or its columns. The second bias comes in
        whole to every rank of a tensor-parallel group."""
        parallel = self.moe_config.moe_parallel_config
        for name, whole in weights.items():
            param = getattr(self, name)
            part = whole[self.first : self.first + param.shape[0]]
            if parallel.tp_size > 1 and name != "w2_bias":
                axis = 2 if name == "w2_weight" else 1
                halves = 2 if axis == 1 and self.moe_config.is_act_and_mul else 1
                chunks = [c.chunk(parallel.tp_size, axis) for c in part.chunk(halves, axis)]
                part = torch.cat([c[parallel.tp_rank] for c in chunks], axis)
            param.copy_(part)

    def forward_modular(
        self, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None
    ):
        assert not self.quant_method.is_monolithic
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
