"""What a `MoELayer` becomes when it keeps some of its experts alone."""

from __future__ import annotations

from functools import partial

from torch import nn

from moe_ops.layer import fewer
from moe_ops.layer.module import MoELayer
from moe_ops.restricted.changes import Layer, Sliced
from moe_ops.restricted.keep import least_of_group, routing_refusal


def layer_of(name: str, layer: MoELayer, kept: tuple[int, ...]) -> Layer:
    """Raises ValueError, saying what to do, for a layer that cannot keep these experts alone."""
    routing = layer.routing
    reason = fewer.refusal(layer) or routing_refusal(
        kept, layer.num_experts, layer.top_k, routing.n_group, routing.topk_group,
        least_of_group(routing.group_reduce),
    )  # fmt: skip
    if reason is not None:
        raise ValueError(f"{name} cannot be restricted: {reason}")
    if len(kept) == layer.num_experts:
        return Layer(name=name, num_experts=layer.num_experts, kept=kept)

    def cut(module: nn.Module, own: str, more: int = 0) -> Sliced:
        inside = "gate." if module is layer.gate else ""
        return Sliced(path=f"{name}.{inside}{own}", module=module, name=own, axis=0, more=more)

    tensors = [cut(layer, own, layer.placement.shared) for own in layer.expert_tensors()]
    if layer.correction_bias is not None:
        tensors.append(cut(layer, "correction_bias"))
    if layer.gate is not None:
        tensors += [cut(layer.gate, own) for own, _ in layer.gate.named_parameters()]
    return Layer(
        name=name, num_experts=layer.num_experts, kept=kept, tensors=tuple(tensors),
        adopt=partial(fewer.adopt, layer),
    )  # fmt: skip
