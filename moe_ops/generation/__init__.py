"""`generate` of compiled transformers models: a prompt by layers, steps from fixed buffers."""

from moe_ops.generation.generate import generation_report

__all__ = ["generation_report"]
