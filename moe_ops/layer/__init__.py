"""A rank's share of an MoE layer as a module: what it is told, what it holds, what it returns."""

from moe_ops.layer.module import MoELayer
from moe_ops.layer.options import QuantFormats, Routing

__all__ = ["MoELayer", "QuantFormats", "Routing"]
