"""A rank's share of an MoE layer as a module: what it is told, what it holds, what it returns."""

from typing import Any

from moe_ops.checks.renamed import what_was
from moe_ops.layer.loads import ModelLoads, model_loads
from moe_ops.layer.module import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.layer.rebalance import rebalance_layers
from moe_ops.layer.recorder import LoadRecorder, Rebalancing
from moe_ops.layer.records import Latent, OwnTokens, Padding, Placement, SharedExperts
from moe_ops.layer.resize import resize_layer

__all__ = [
    "Latent",
    "LoadRecorder",
    "MoELayer",
    "ModelLoads",
    "OwnTokens",
    "Padding",
    "Placement",
    "Rebalancing",
    "Routing",
    "SharedExperts",
    "model_loads",
    "rebalance_layers",
    "resize_layer",
]


def __getattr__(name: str) -> Any:
    found = what_was("moe_ops.layer", name)
    if found is None:
        raise AttributeError(f"module 'moe_ops.layer' has no attribute {name!r}")
    return found
