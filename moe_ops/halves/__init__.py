"""Two halves of a batch in a block over ranks: one computes while the other's tokens travel."""

from moe_ops.halves.plan import HalvesPlan, plan_halves
from moe_ops.halves.run import two_halves

__all__ = ["HalvesPlan", "plan_halves", "two_halves"]
