"""What runs experts without quantisation."""

import torch
from torch import nn

from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, CustomOp):
    def __init__(self, moe):
        super().__init__(moe)
        self.unquantized_backend, self.experts_cls = select_unquantized_moe_backend(moe)

    @property
    def supports_eplb(self):
        return True

    def create_weights(
        self,
        layer,
        num_experts,
        hidden_size,
        intermediate_size_per_partition,
        params_dtype,
        **extra_weight_attrs,
    ):
        E, D, I = num_experts, hidden_size, intermediate_size_per_partition  # noqa: E741
        F = 2 * I if self.moe.is_act_and_mul else I
        shapes = {"w13_weight": (E, F, D), "w2_weight": (E, D, I)}
        if self.moe.has_bias:
            shapes |= {"w13_bias": (E, F), "w2_bias": (E, D)}
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=params_dtype)
            layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def process_weights_after_loading(self, layer):
        raise AssertionError("weights are turned around for vLLM's own kernels")

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        raise AssertionError("vLLM's own kernels run")
