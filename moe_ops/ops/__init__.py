"""The ops: the stages of a Mixture-of-Experts layer, fusions of them, a count. One file per op."""

from moe_ops.ops import rules as _rules  # noqa: F401  (tells torch of the rules)
from moe_ops.ops.activate import activate
from moe_ops.ops.combine import combine
from moe_ops.ops.combine_tokens import combine_tokens
from moe_ops.ops.dispatch import dispatch
from moe_ops.ops.dispatch_tokens import dispatch_tokens
from moe_ops.ops.expert_gemm import expert_gemm
from moe_ops.ops.expert_loads import expert_loads
from moe_ops.ops.experts import experts
from moe_ops.ops.experts_over_ranks import experts_over_ranks
from moe_ops.ops.moe import moe
from moe_ops.ops.quantize import quantize
from moe_ops.ops.route import route
from moe_ops.ops.sum_ranks import sum_ranks

__all__ = [
    "activate",
    "combine",
    "combine_tokens",
    "dispatch",
    "dispatch_tokens",
    "expert_gemm",
    "expert_loads",
    "experts",
    "experts_over_ranks",
    "moe",
    "quantize",
    "route",
    "sum_ranks",
]
