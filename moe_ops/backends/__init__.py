"""Backends of the ops. Importing this package registers them; earlier imports are asked first."""

from moe_ops.backends import cpu  # isort: skip
from moe_ops.backends import aten  # isort: skip

__all__ = ["aten", "cpu"]
