"""What is reported of the graphs of a compiled model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from moe_ops.graphs.report import GraphReport, refusals


def graphs_of(call: Any, model: nn.Module) -> GraphReport:
    """The graphs of a compiled model, which is called by this."""
    by_layers, generation = call.by_layers, getattr(model, "_moe_ops_generation", None)
    found = GraphReport()
    if by_layers is not None:
        forwards = by_layers.forwards
        reasons = (
            *refusals("forward as one graph", by_layers.refused.items()),
            *refusals("forward", forwards.refused.items()),
        )
        found = replace(found, forwards=forwards.report(), refusals=reasons)
    if generation is not None:
        reasons = refusals("generate of transformers", generation.refused.items())
        found = replace(
            found,
            generation=tuple(generation.decoder.report()),
            refusals=(*found.refusals, *reasons),
        )
    return found
