"""What the passes make of a model: graphs without code generation, told as text, JSON or a page."""

from __future__ import annotations

from moe_ops.passes.explain.api import explain

__all__ = ["explain"]
