"""What a decoding step does beside its experts: products of few rows, one-query attention, linear
attention and state spaces, a sum; and of the linear layers what they do with a whole prompt.

They are no stages of a layer, so they have a registry of their own,
`moe_ops.registry.spec.DECODE_OPS`; passes and stand-ins put them into graphs. One file per op.
"""

from moe_ops.decode_ops import rules as _rules  # noqa: F401  (tells torch of the rules)
from moe_ops.decode_ops.convolution_step import convolution_step
from moe_ops.decode_ops.delta_rule import delta_rule
from moe_ops.decode_ops.delta_rule_step import delta_rule_step
from moe_ops.decode_ops.experts_onto import experts_onto
from moe_ops.decode_ops.linears import linears
from moe_ops.decode_ops.normed_linears import normed_linears
from moe_ops.decode_ops.normed_quantized_linears import normed_quantized_linears
from moe_ops.decode_ops.one_query import one_query
from moe_ops.decode_ops.one_query_latents import one_query_latents
from moe_ops.decode_ops.quantized_linears import quantized_linears
from moe_ops.decode_ops.rope_attention import rope_attention
from moe_ops.decode_ops.state_space_scan import state_space_scan
from moe_ops.decode_ops.state_space_step import state_space_step

__all__ = [
    "convolution_step",
    "delta_rule",
    "delta_rule_step",
    "experts_onto",
    "linears",
    "normed_linears",
    "normed_quantized_linears",
    "one_query",
    "one_query_latents",
    "quantized_linears",
    "rope_attention",
    "state_space_scan",
    "state_space_step",
]
