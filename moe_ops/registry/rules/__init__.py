"""What other parts of torch are told of an op: one file for each of these consumers.

A rule is declared beside the definition of its op. What torch imports late, it is told when it
does.
"""

from moe_ops.registry.rules.declared import Rules

__all__ = ["Rules"]
