"""A layer with another number of experts than it was made with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from moe_ops.layer.module import MoELayer
from moe_ops.layer.tensors import layer_buffers
from moe_ops.parallel.expert_map import place


def refusal(layer: MoELayer) -> str | None:
    """Why the experts of a layer cannot become fewer, or None."""
    if layer.parallel.size > 1 or layer.exchange is not None:
        return (
            f"it is of one rank among others ({layer.parallel.describe()}, "
            f"tokens={layer.tokens!r}); restrict a layer of one rank, and load its state dict into "
            "layers of so many experts on all ranks"
        )
    if layer.placement.balanced or layer.placement.redundant:
        return "its experts have loads and replicas; make it without balanced or redundant_experts"
    if layer.routing.custom is not None:
        return (
            "its custom routing may know experts by their number; give a layer with fewer experts "
            "a function of its own"
        )
    if layer.gate is not None and not isinstance(layer.gate, nn.Linear):
        return (
            f"its gate is a {type(layer.gate).__name__}, of which only its author knows what "
            "belongs to an expert; take an nn.Linear, or give forward the logits"
        )
    return None


def adopt(layer: MoELayer, num_experts: int) -> None:
    """Write down in a layer of one rank that it has so many experts, where their tensors have
    become as many."""
    before = layer.placement
    placement = place(
        num_experts, layer.parallel, placement=before.requested, shared=before.shared,
        num_groups=before.num_groups,
    )  # fmt: skip
    layer.num_experts, layer.placement = num_experts, placement
    layer.expert_offset = placement.offset
    layer.sizes = replace(layer.sizes, E=placement.num_slots)
    layer._specs = {
        name: spec and replace(spec, shape=(getattr(layer, name).shape[0], *spec.shape[1:]))
        for name, spec in layer._specs.items()
    }
    buffers = (placement, layer.sizes, layer.quant, False)
    layer._first_buffers = partial(layer_buffers, *buffers)
    if isinstance(layer.gate, nn.Linear):
        layer.gate.out_features = num_experts
    layer._stored.resized += 1
