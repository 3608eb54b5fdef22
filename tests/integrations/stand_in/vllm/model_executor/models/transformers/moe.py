"""What takes the place of an `experts` child: a module that calls an op with its name."""

import torch
from torch import nn

LAYERS: dict[str, nn.Module] = {}


def transformers_moe_forward(hidden_states, topk_ids, topk_weights, layer_name):
    assert topk_ids.dtype == torch.int32 and topk_weights.dtype == torch.float32
    return LAYERS[layer_name].routed_experts.forward_modular(
        x=hidden_states, topk_weights=topk_weights, topk_ids=topk_ids
    )


class TransformersMoERunner(nn.Module):
    """The sum over ranks is left to the caller."""

    def __init__(self, routed_experts):
        super().__init__()
        self.routed_experts = routed_experts
        self.layer_name = routed_experts.layer_name
        LAYERS[self.layer_name] = self

    def forward(self, hidden_states, topk_ids, topk_weights):
        return transformers_moe_forward(
            hidden_states, topk_ids.to(torch.int32), topk_weights.to(torch.float32), self.layer_name
        )
