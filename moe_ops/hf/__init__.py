"""Hugging Face transformers: importing this registers the experts implementation "moe_ops"."""

from moe_ops.hf.experts import register
from moe_ops.hf.optimize import optimize, restore

__all__ = ["optimize", "restore"]

register()
