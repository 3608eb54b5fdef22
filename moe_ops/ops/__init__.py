"""The ops: the stages of a Mixture-of-Experts layer, fusions of them, a count. One file per op."""

from moe_ops.ops import gradients as _gradients  # noqa: F401  (binds formulas to ops)
from moe_ops.ops import gradients_adapted as _gradients_adapted  # noqa: F401
from moe_ops.ops import rules as _rules  # noqa: F401  (tells torch of the rules)
from moe_ops.ops.activate import activate
from moe_ops.ops.activate_backward import activate_backward
from moe_ops.ops.combine import combine
from moe_ops.ops.combine_tokens import combine_tokens
from moe_ops.ops.dispatch import dispatch
from moe_ops.ops.dispatch_tokens import dispatch_tokens
from moe_ops.ops.expert_gemm import expert_gemm
from moe_ops.ops.expert_loads import expert_loads
from moe_ops.ops.expert_wgrad import expert_wgrad
from moe_ops.ops.expert_wgrad_onto import expert_wgrad_onto
from moe_ops.ops.experts import experts
from moe_ops.ops.experts_accumulating import experts_accumulating
from moe_ops.ops.experts_adapted import experts_adapted
from moe_ops.ops.experts_adapted_backward import experts_adapted_backward
from moe_ops.ops.experts_adapted_saving import experts_adapted_saving
from moe_ops.ops.experts_backward import experts_backward
from moe_ops.ops.experts_batched import experts_batched
from moe_ops.ops.experts_over_ranks import experts_over_ranks
from moe_ops.ops.experts_saving import experts_saving
from moe_ops.ops.moe import moe
from moe_ops.ops.quantize import quantize
from moe_ops.ops.route import route
from moe_ops.ops.route_recording import route_recording
from moe_ops.ops.route_replaying import route_replaying
from moe_ops.ops.sum_ranks import sum_ranks

__all__ = [
    "activate",
    "activate_backward",
    "combine",
    "combine_tokens",
    "dispatch",
    "dispatch_tokens",
    "expert_gemm",
    "expert_loads",
    "expert_wgrad",
    "expert_wgrad_onto",
    "experts",
    "experts_accumulating",
    "experts_adapted",
    "experts_adapted_backward",
    "experts_adapted_saving",
    "experts_backward",
    "experts_batched",
    "experts_over_ranks",
    "experts_saving",
    "moe",
    "quantize",
    "route",
    "route_recording",
    "route_replaying",
    "sum_ranks",
]
