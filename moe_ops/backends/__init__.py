"""Backends of the ops. Importing this package registers them."""

from moe_ops.backends import aten, cpu, dequantize

__all__ = ["aten", "cpu", "dequantize"]
