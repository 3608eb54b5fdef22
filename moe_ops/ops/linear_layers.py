"""Linear layers that are batch invariant, as the product of one expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ops.ops.expert_gemm import expert_gemm
from moe_ops.registry.invariance import INVARIANT, invariant_if


def apply_linear(layer: nn.Module, x: Tensor, batch_invariant: bool) -> Tensor:
    """What a layer gives for rows [..., K]. A plain linear layer is batch invariant if wanted, or
    if eager calls here have to be; any other module is called.

    Raises NotImplementedError where nothing computes a linear layer so.
    """
    # In graphs the options of their compiler decide, and a pass finds linear layers.
    wanted = batch_invariant or (not torch.compiler.is_dynamo_compiling() and INVARIANT.get())
    if not (wanted and isinstance(layer, nn.Linear) and is_plain(layer)):
        made: Tensor = layer(x)
        return made
    x_TK = x.reshape(-1, x.shape[-1])
    ends_E = torch.full((1,), x_TK.shape[0], dtype=torch.int32, device=x.device)
    bias_EF = None if layer.bias is None else layer.bias[None]
    y_TN: Tensor = invariant_if(True, expert_gemm)(x_TK, layer.weight[None], ends_E, bias_EF)
    return y_TN.reshape(*x.shape[:-1], y_TN.shape[-1])


def is_plain(layer: nn.Linear) -> bool:
    """Whether a linear layer is torch's own, and nobody looks at its calls."""
    own = type(layer).forward is nn.Linear.forward
    return own and not layer._forward_hooks and not layer._forward_pre_hooks
