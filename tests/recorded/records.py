"""Records of routings for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ops import RecordedRouting
from tests.hf import families


def random_record(
    *calls: tuple[int, int],
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    weights: bool = False,
) -> RecordedRouting:
    """Random experts, different ones for each token and layer, for calls of these sizes."""
    T = sum(batch * tokens for batch, tokens in calls)
    chosen = torch.rand(T, layers, experts).argsort(-1)[..., :top_k].to(torch.int16)
    return RecordedRouting(
        ids_TLK=chosen,
        weights_TLK=torch.rand(chosen.shape) if weights else None,
        calls=calls,
        layers=tuple(f"layers.{i}.experts" for i in range(layers)),
        num_experts=experts,
    )


class Chosen:
    """What the experts of a model are given, by hooks: of each layer the ids and weights of all
    calls."""

    def __init__(self, model: nn.Module) -> None:
        self.ids: dict[str, list[Tensor]] = {}
        self.weights: dict[str, list[Tensor]] = {}
        self.inputs: dict[str, list[Tensor]] = {}
        for name, module in families.experts(model).items():
            module.register_forward_pre_hook(self._note(name))

    def _note(self, name: str):
        def note(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
            x, ids, weights = args
            self.inputs.setdefault(name, []).append(x.detach().clone())
            self.ids.setdefault(name, []).append(ids.clone())
            self.weights.setdefault(name, []).append(weights.detach().clone())

        return note

    def stacked(self, of: dict[str, list[Tensor]]) -> Tensor:
        """[T, L, K]."""
        return torch.stack([torch.cat(found) for found in of.values()], 1)
