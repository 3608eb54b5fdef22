"""The logits that a layer's own router makes of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ops.ops import expert_gemm
from moe_ops.registry.invariance import invariant_if


def logits_of(gate: nn.Module, x_TD: Tensor, batch_invariant: bool) -> Tensor:
    """What a gate gives for tokens, [T, E]. A plain linear layer is batch invariant if wanted, as
    the product of one expert; any other module is called."""
    if not (batch_invariant and isinstance(gate, nn.Linear) and is_plain(gate)):
        made: Tensor = gate(x_TD)
        return made
    ends_E = torch.full((1,), x_TD.shape[0], dtype=torch.int32, device=x_TD.device)
    bias_EF = None if gate.bias is None else gate.bias[None]
    product: Tensor = invariant_if(True, expert_gemm)(x_TD, gate.weight[None], ends_E, bias_EF)
    return product


def is_plain(gate: nn.Linear) -> bool:
    """Whether a linear layer is torch's own, and nobody looks at its calls."""
    return type(gate) is nn.Linear and not gate._forward_hooks and not gate._forward_pre_hooks
