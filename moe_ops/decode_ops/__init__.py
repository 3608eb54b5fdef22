"""What a decoding step does beside its experts: products of few rows, one-query attention, a sum.

The passes put these ops into graphs; they are no stages of a layer, so they have a registry of
their own, `moe_ops.registry.spec.DECODE_OPS`. One file per op.
"""

from moe_ops.decode_ops.experts_onto import experts_onto
from moe_ops.decode_ops.linears import linears
from moe_ops.decode_ops.normed_linears import normed_linears
from moe_ops.decode_ops.one_query import one_query
from moe_ops.decode_ops.rope_attention import rope_attention

__all__ = ["experts_onto", "linears", "normed_linears", "one_query", "rope_attention"]
