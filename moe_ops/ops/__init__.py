"""The ops: the stages of a Mixture-of-Experts layer, fusions of them, a count. One file per op."""

from moe_ops.ops.activate import activate
from moe_ops.ops.combine import combine
from moe_ops.ops.dispatch import dispatch
from moe_ops.ops.expert_gemm import expert_gemm
from moe_ops.ops.expert_loads import expert_loads
from moe_ops.ops.experts import experts
from moe_ops.ops.moe import moe
from moe_ops.ops.quantize import quantize
from moe_ops.ops.route import route

__all__ = [
    "activate",
    "combine",
    "dispatch",
    "expert_gemm",
    "expert_loads",
    "experts",
    "moe",
    "quantize",
    "route",
]
