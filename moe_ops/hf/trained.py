"""Experts of transformers that train on our ops, in the twin that `compile` makes of a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe_ops.hf.adapters.held import CHILD
from moe_ops.hf.experts import DOUBLE, describe, is_experts, require_no_main_grad, run
from moe_ops.hf.stored import stored_format
from moe_ops.interop.subclass import CopiedAsItWas, subclass
from moe_ops.registry.gradients import needs_grad


class TrainedExperts(CopiedAsItWas, nn.Module):
    """What stands before the class of a twin's experts. Passes lift the code of experts into ops
    where nothing is trained; a training graph has the ops from the start, as what a backward needs
    of that code is saved all over the graph."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        own = super().forward
        given = hidden_states, top_k_index, top_k_weights
        if CHILD not in self._modules:  # adapters are added by ops alone
            if not needs_grad(hidden_states, top_k_weights, *self.parameters(recurse=False)):
                return own(*given)
            if describe(self) == DOUBLE:
                require_no_main_grad(self, DOUBLE)
                return own(*given)
        found = describe(self)
        return run(self, found, *given, lambda _, *same: own(*same))


def train_on_ops(twin: nn.Module, model: nn.Module) -> None:
    """Have the experts of a model's twin run on our ops where a gradient may be wanted; those that
    hold codes do so anyway."""
    own = {id(module) for module in model.modules()}  # some cannot be twinned, and are shared
    for module in twin.modules():
        kind: Any = type(module)
        known = id(module) in own or issubclass(kind, TrainedExperts)
        if not known and is_experts(module) and stored_format(module) is None:
            module.__class__ = subclass(TrainedExperts, kind)
