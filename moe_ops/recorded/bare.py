"""Layers of models that are not of transformers: each `MoELayer` writes down whom it chooses, or is
given it, before replicas and fused shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.interop.subclass import CopiedAsItWas, Swapped
from moe_ops.layer import MoELayer
from moe_ops.ops import route_recording, route_replaying
from moe_ops.ops.route_recording import write_rows
from moe_ops.registry.invariance import invariant_if

RING_IDS, RING_WEIGHTS, AT = "moe_ops_ring_ids", "moe_ops_ring_weights", "moe_ops_ring_at"
GIVEN_IDS, GIVEN_WEIGHTS = "moe_ops_given_ids", "moe_ops_given_weights"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bare:
    """A layer of experts that routes itself."""

    name: str
    experts: MoELayer

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts

    @property
    def top_k(self) -> int:
        return self.experts.top_k


def bare_of(model: nn.Module) -> list[Bare]:
    """The `MoELayer`s of a model, or the one that it is, in their order."""
    named = model.named_modules()
    return [Bare(name=name, experts=m) for name, m in named if isinstance(m, MoELayer)]


def recording(
    layers: list[Bare], ids: list[Tensor], weights: list[Tensor] | None, at: Tensor
) -> Swapped:
    """Have layers write to rings, each to its own."""
    swapped = Swapped()
    for i, layer in enumerate(layers):
        buffers = {RING_IDS: ids[i], RING_WEIGHTS: weights[i] if weights else None, AT: at}
        swapped.swap(layer.experts, RecordingLayer, buffers)
    return swapped


def replaying(layers: list[Bare], ids_LSK: Tensor, weights_LSK: Tensor | None) -> Swapped:
    """Have layers read windows, each its own: ids before weights are computed, or both."""
    swapped = Swapped()
    for i, layer in enumerate(layers):
        given = None if weights_LSK is None else weights_LSK[i]
        buffers = {GIVEN_IDS: ids_LSK[i], GIVEN_WEIGHTS: given}
        swapped.swap(layer.experts, ReplayingLayer, buffers)
    return swapped


def replay_refusal(layer: Bare) -> str | None:
    """Why the weights of given experts cannot be computed from the logits of a layer, or None."""
    if layer.experts.routing.custom is None:
        return None
    return "its routing is a function of its own"


class RecordingLayer(CopiedAsItWas, nn.Module):
    """What stands before the class of a layer whose choices are recorded: all layers share it, so
    that they are compiled once."""

    def choose(self: Any, x_TD: Tensor, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's own choice, which the launch that makes it writes down; that of a custom
        routing is copied."""
        ids, at, weights = (getattr(self, name) for name in (RING_IDS, AT, RING_WEIGHTS))
        if self.routing.custom is None:
            choose = invariant_if(self.batch_invariant, route_recording)
            weights_TK, ids_TK = choose(
                logits_TE, self.top_k, ids, at, bias_E=self.correction_bias,
                ring_weights_SK=weights, **self.routing.options,
            )  # fmt: skip
            return weights_TK, ids_TK
        weights_TK, ids_TK = super().choose(x_TD, logits_TE)  # type: ignore[misc]
        write_rows(ids, at, ids_TK)
        if weights is not None:
            write_rows(weights, at, weights_TK)
        return weights_TK, ids_TK


class ReplayingLayer(CopiedAsItWas, nn.Module):
    """What stands before the class of a layer whose choices are given."""

    def choose(self: Any, x_TD: Tensor, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The given experts, with given weights or those of the logits. Rows that begin with a
        negative number are chosen."""
        given, weights = getattr(self, GIVEN_IDS), getattr(self, GIVEN_WEIGHTS)
        if weights is None:
            choose = invariant_if(self.batch_invariant, route_replaying)
            weights_TK, ids_TK = choose(
                logits_TE, self.top_k, given, bias_E=self.correction_bias, **self.routing.options
            )
            return weights_TK, ids_TK
        weights_TK, ids_TK = super().choose(x_TD, logits_TE)  # type: ignore[misc]
        T = ids_TK.shape[0]
        given_TK, weights_SK = given[:T].to(ids_TK.dtype), weights[:T].to(weights_TK.dtype)
        own = given_TK[:, :1] < 0
        ids_TK = torch.where(own, ids_TK, given_TK)
        return torch.where(own, weights_TK, weights_SK), ids_TK
