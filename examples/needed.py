"""Imported by the examples that need transformers, before it: raises ImportError, which names the
version that is wanted."""

from moe_ops.installed import require_transformers

require_transformers("this example")
