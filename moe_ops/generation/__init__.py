"""`generate` of compiled transformers models: a prompt by layers, steps from fixed buffers."""

from moe_ops.installed import require_transformers

require_transformers("moe_ops.generation, with generation_report,")

from moe_ops.generation.generate import generation_report  # noqa: E402

__all__ = ["generation_report"]
