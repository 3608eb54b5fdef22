"""What torch is told of the ops of a decoding step: the rules of each op of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.decode_ops.convolution_step import ConvolutionStepCall, convolution_step
from moe_ops.decode_ops.delta_rule import BLOCK, DeltaRuleCall, delta_rule
from moe_ops.decode_ops.delta_rule import CHUNK as CHUNK_OF_RULE
from moe_ops.decode_ops.delta_rule_step import DeltaRuleStepCall, delta_rule_step
from moe_ops.decode_ops.experts_onto import experts_onto
from moe_ops.decode_ops.linears import LinearsCall, linears
from moe_ops.decode_ops.normed_linears import NormedLinearsCall, normed_linears
from moe_ops.decode_ops.normed_quantized_linears import (
    NormedQuantizedLinearsCall,
    normed_quantized_linears,
)
from moe_ops.decode_ops.one_query import OneQueryCall, one_query
from moe_ops.decode_ops.one_query_latents import OneQueryLatentsCall, one_query_latents
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall, quantized_linears
from moe_ops.decode_ops.rope_attention import RopeAttentionCall, attention, rope_attention
from moe_ops.decode_ops.state_space_scan import CHUNK as CHUNK_OF_SCAN
from moe_ops.decode_ops.state_space_scan import StateSpaceScanCall, state_space_scan
from moe_ops.decode_ops.state_space_step import StateSpaceStepCall, state_space_step
from moe_ops.ops.rules import EACH, LAYER, ROUTED, experts_flops, quantizes_all
from moe_ops.registry.rules import Rules
from moe_ops.registry.rules.flops import product
from moe_ops.registry.rules.vmap import Batched
from moe_ops.registry.spec import Op


def linear_flops(x_TK: Tensor, weights: Sequence[Tensor]) -> int:
    return sum(product(*x_TK.shape, w_NK.shape[0]) for w_NK in weights)


def linears_flops(
    call: LinearsCall | NormedLinearsCall | QuantizedLinearsCall | NormedQuantizedLinearsCall,
) -> int:
    return linear_flops(call.x_TK, call.weights)


def attention_flops(call: OneQueryCall) -> int:
    (B, H, D), slots, DV = call.q_BHD.shape, call.k_BNSD.shape[2], call.v_BNSD.shape[3]
    return product(B, H, slots, D) + product(B, H, slots, DV)


def latents_flops(call: OneQueryLatentsCall) -> int:
    """Scores of latents and of rotated parts, and the sum of latents, of the slots asked for."""
    (B, H, R), rotated = call.q_BHR.shape, call.q_rope_BHD.shape[2]
    slots = call.latents_BSR.shape[1] if call.indices_BC is None else call.indices_BC.shape[1]
    return product(B, H, slots, R + rotated) + product(B, H, slots, R)


def convolution_flops(call: ConvolutionStepCall) -> int:
    return product(*call.x_BD.shape, call.weight_DW.shape[1])


def rule_step_flops(call: DeltaRuleStepCall) -> int:
    """What the state gives for the key and for the query. What is added to it is no product of
    matrices for torch."""
    B, H, V = call.v_BHV.shape
    return 2 * product(B, H, V, call.q_BND.shape[2])


def rule_flops(call: DeltaRuleCall) -> int:
    """By chunks: scores of queries and of keys, what a state gives for both, new values, and what
    they add to the state. torch counts no solution of triangular systems."""
    B, T, H, V = call.v_BTHV.shape
    D = call.q_BTND.shape[3]
    size = min(CHUNK_OF_RULE, -(-max(T, 1) // BLOCK) * BLOCK)
    chunks = B * H * -(-T // size)
    if call.g_BTHD.dim() == 3:
        scores = product(2, size, size, D)
    else:  # of pairs in different blocks alone; others are no product of matrices
        blocks = size // BLOCK
        scores = product(2, blocks * (blocks - 1) // 2, BLOCK, BLOCK, D)
    return chunks * (scores + 3 * product(size, D, V) + product(size, size, V))


def space_step_flops(call: StateSpaceStepCall) -> int:
    return product(*call.x_BHV.shape, call.c_BND.shape[2])


def scan_flops(call: StateSpaceScanCall) -> int:
    """By chunks: scores of each group, what they give in a chunk, what a chunk adds to the state,
    and what the state gives."""
    (B, T, H, V), (N, D) = call.x_BTHV.shape, call.b_BTND.shape[2:]
    size = min(CHUNK_OF_SCAN, max(T, 1))
    of_group = N * product(size, size, D)
    of_heads = H * (product(size, size, V) + 2 * product(size, D, V))
    return B * -(-T // size) * (of_group + of_heads)


def rope_flops(call: RopeAttentionCall) -> int:
    return attention_flops(attention(call, call.q_BHD))


OF_STEPS = (
    "stands in steps alone: passes put it behind autocast, or its caches have a dtype of their own"
)

ON_A_RANK = "stands in steps alone, whose caches and weights are those of a rank"

CODES_ARE_WHOLE = "multiplies codes, of which each rank has all; give it the tensors of a rank"

RULES: dict[Op, Rules] = {
    convolution_step: Rules(
        flops=convolution_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK
    ),
    delta_rule: Rules(flops=rule_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK),
    delta_rule_step: Rules(flops=rule_step_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK),
    experts_onto: Rules(
        flops=lambda call: experts_flops(call.layer),
        autocast=("residual_TD", *LAYER),
        vmap=Batched(("residual_TD", *ROUTED), apart=lambda call: quantizes_all(call.layer)),
        sharding=ON_A_RANK,
    ),
    linears: Rules(flops=linears_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK),
    normed_linears: Rules(flops=linears_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK),
    normed_quantized_linears: Rules(
        flops=linears_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK
    ),
    one_query: Rules(flops=attention_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK),
    one_query_latents: Rules(flops=latents_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK),
    quantized_linears: Rules(
        flops=linears_flops, autocast=("x_TK",), vmap=Batched(("x_TK",)), sharding=CODES_ARE_WHOLE
    ),
    rope_attention: Rules(flops=rope_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK),
    state_space_scan: Rules(flops=scan_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK),
    state_space_step: Rules(
        flops=space_step_flops, autocast=OF_STEPS, vmap=EACH, sharding=ON_A_RANK
    ),
}

for _op, _rules in RULES.items():
    _op.obeys(_rules)
