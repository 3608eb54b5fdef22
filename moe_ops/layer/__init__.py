"""A rank's share of an MoE layer as a module: what it is told, what it holds, what it returns."""

import warnings
from typing import Any

from moe_ops.layer.loads import ModelLoads, model_loads
from moe_ops.layer.module import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.layer.rebalance import rebalance_layers
from moe_ops.layer.recorder import LoadRecorder, Rebalancing
from moe_ops.layer.records import Latent, OwnTokens, Padding, Placement, SharedExperts
from moe_ops.layer.resize import resize_layer
from moe_ops.quant.config import QuantConfig

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
    if name == "QuantFormats":
        return quant_formats(stacklevel=3)
    raise AttributeError(f"module 'moe_ops.layer' has no attribute {name!r}")


def quant_formats(stacklevel: int) -> type[QuantConfig]:
    """What had the name QuantFormats once; the warning is for the frame at this level."""
    message = "QuantFormats is now moe_ops.QuantConfig; take that name"
    warnings.warn(message, FutureWarning, stacklevel=stacklevel)
    return QuantConfig
