"""Backends of the ops. Importing this package registers them."""

from moe_ops.backends import aten, cpu, dequantize, triton, triton_decode

__all__ = ["aten", "cpu", "dequantize", "triton", "triton_decode"]
