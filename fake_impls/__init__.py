"""The fakes: for each op, a pure function from the shapes of its arguments to the shapes of its
results.

Each takes the arguments as the attributes of one value (`call.x_TD`), as the op's record has them.
They import torch alone, so another compiler can take them without the rest of the package. One file
per op, named as the op; results are always contiguous.
"""

from .activate import activate
from .activate_backward import activate_backward
from .combine import combine
from .combine_tokens import combine_tokens
from .convolution_step import convolution_step
from .delta_rule import delta_rule
from .delta_rule_step import delta_rule_step
from .dispatch import dispatch
from .dispatch_tokens import dispatch_tokens
from .expert_gemm import expert_gemm
from .expert_loads import expert_loads
from .expert_wgrad import expert_wgrad
from .expert_wgrad_onto import expert_wgrad_onto
from .experts import experts
from .experts_accumulating import experts_accumulating
from .experts_adapted import experts_adapted
from .experts_adapted_backward import experts_adapted_backward
from .experts_adapted_saving import experts_adapted_saving
from .experts_backward import experts_backward
from .experts_batched import experts_batched
from .experts_onto import experts_onto
from .experts_over_ranks import experts_over_ranks
from .experts_saving import experts_saving
from .linears import linears
from .moe import moe
from .normed_linears import normed_linears
from .normed_quantized_linears import normed_quantized_linears
from .one_query import one_query
from .one_query_latents import one_query_latents
from .quantize import quantize
from .quantized_linears import quantized_linears
from .rope_attention import rope_attention
from .route import route
from .route_recording import route_recording
from .route_replaying import route_replaying
from .state_space_scan import state_space_scan
from .state_space_step import state_space_step
from .sum_ranks import sum_ranks

__all__ = [
    "activate",
    "activate_backward",
    "combine",
    "combine_tokens",
    "convolution_step",
    "delta_rule",
    "delta_rule_step",
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
    "experts_onto",
    "experts_over_ranks",
    "experts_saving",
    "linears",
    "moe",
    "normed_linears",
    "normed_quantized_linears",
    "one_query",
    "one_query_latents",
    "quantize",
    "quantized_linears",
    "rope_attention",
    "route",
    "route_recording",
    "route_replaying",
    "state_space_scan",
    "state_space_step",
    "sum_ranks",
]
