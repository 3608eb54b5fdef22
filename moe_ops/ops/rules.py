"""What torch is told of the stages of a layer: the rules of each op of this folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_ops.ops.activate import activate
from moe_ops.ops.activate_backward import activate_backward
from moe_ops.ops.adapters import OF_ADAPTER, Adapter
from moe_ops.ops.combine import combine
from moe_ops.ops.combine_tokens import combine_tokens
from moe_ops.ops.dispatch import dispatch
from moe_ops.ops.dispatch_tokens import dispatch_tokens
from moe_ops.ops.expert_gemm import ExpertGemmCall, expert_gemm
from moe_ops.ops.expert_loads import expert_loads
from moe_ops.ops.expert_wgrad import ExpertWgradCall, expert_wgrad
from moe_ops.ops.expert_wgrad_onto import expert_wgrad_onto
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.experts_accumulating import experts_accumulating
from moe_ops.ops.experts_adapted import experts_adapted
from moe_ops.ops.experts_adapted_backward import (
    ExpertsAdaptedBackwardCall,
    experts_adapted_backward,
)
from moe_ops.ops.experts_adapted_saving import experts_adapted_saving
from moe_ops.ops.experts_backward import ExpertsBackwardCall, experts_backward
from moe_ops.ops.experts_batched import ExpertsBatchedCall, experts_batched
from moe_ops.ops.experts_over_ranks import experts_over_ranks
from moe_ops.ops.experts_saving import experts_saving
from moe_ops.ops.moe import moe
from moe_ops.ops.quantize import QuantizeCall, quantize
from moe_ops.ops.route import route
from moe_ops.ops.route_recording import route_recording
from moe_ops.ops.route_replaying import route_replaying
from moe_ops.ops.splits import rows_of, splits
from moe_ops.ops.sum_ranks import sum_ranks
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.registry.rules import Rules
from moe_ops.registry.rules.autocast import AS_GIVEN
from moe_ops.registry.rules.flops import NO_PRODUCT, product
from moe_ops.registry.rules.sharding import Sharded
from moe_ops.registry.rules.vmap import Batched
from moe_ops.registry.spec import Op


def gemm_flops(call: ExpertGemmCall) -> int:
    """One product of each row, of unused rows too: a shape does not tell how many there are."""
    width = call.x_RD.shape[1]
    if call.x_format:
        width = Format.of(call.x_format).parsed.unpacked(width)
    return product(call.x_RD.shape[0], call.w_EFD.shape[2 if call.transposed else 1], width)


def layer_flops(layer: ExpertsCall, pairs: int) -> int:
    """Both products of so many pairs of a token and an expert."""
    D, I = layer.widths  # noqa: E741
    return product(pairs, D, 2 * I if layer.gated else I) + product(pairs, D, I)


def experts_flops(call: ExpertsCall) -> int:
    return layer_flops(call, call.ids_TK.numel())


def batched_flops(call: ExpertsBatchedCall) -> int:
    """Both products of every slot of a batch: shapes do not tell how many are used."""
    E, M, _ = call.batches.x_EMD.shape
    layer = replace(call.layer, x_TD=call.batches.x_EMD.flatten(0, 1))
    return layer_flops(layer, E * M)


def wgrad_flops(call: ExpertWgradCall) -> int:
    return product(call.rows, call.a_RM.shape[1], call.b_RN.shape[1])


def backward_flops(call: ExpertsBackwardCall | ExpertsAdaptedBackwardCall) -> int:
    """The second product's gradient, and the first one's where that of tokens is wanted."""
    (D, I), pairs = call.layer.widths, call.layer.ids_TK.numel()  # noqa: E741
    first = product(pairs, D, call.y_RF.shape[1]) if call.for_tokens else 0
    return product(pairs, D, I) + first


def adapter_flops(adapter: Adapter, layer: ExpertsCall) -> int:
    """The products by A and by B of each pair of a token and an expert, as if all had adapters."""
    (D, I), (r13, r2), pairs = layer.widths, adapter.ranks, layer.ids_TK.numel()  # noqa: E741
    F = 2 * I if layer.gated else I
    of_13 = product(pairs, r13, D) + product(pairs, F, r13)
    return of_13 + product(pairs, r2, I) + product(pairs, D, r2)


def adapted_flops(call: Any) -> int:
    return experts_flops(call.layer) + adapter_flops(call.adapter, call.layer)


def adapted_backward_flops(call: ExpertsAdaptedBackwardCall) -> int:
    """The products of `experts_backward`, and those of adapters, of which one by A13 is for
    tokens."""
    layer, r13 = call.layer, call.adapter.ranks[0]
    pairs, D = layer.ids_TK.numel(), layer.widths[0]
    left = 0 if call.for_tokens else product(pairs, D, r13)
    return backward_flops(call) + adapter_flops(call.adapter, layer) - left


def moe_flops(call: Any) -> int:
    return layer_flops(call.layer, call.routing.logits_TE.shape[0] * call.routing.top_k)


def quantizes_all(layer: ExpertsCall) -> bool:
    """Whether one scale for all tokens is made at run time, so that tokens depend on each other."""
    return bool(layer.x_format) and Format.of(layer.x_format).group == TENSOR


def scales_all(call: QuantizeCall) -> bool:
    """Whether there is one scale, or a scale that was given."""
    return call.scale is not None or Format.of(call.format).group == TENSOR


LAYER = ("x_TD", "w13_EFD", "w2_EDI")  # what a product of a layer rounds

ROUTED = ("x_TD", "weights_TK", "ids_TK")  # what `experts` has of each token
EACH = Batched()
SORTED = "works on rows in the order of experts, which each rank has of its own tokens"
ADAPTED = "takes adapters in the order of adapter and expert, which no split of experts keeps"
OF_RANKS = "sends what this rank has to the ranks of a process group itself"

RULES: dict[Op, Rules] = {
    route: Rules(
        flops=NO_PRODUCT,
        autocast=AS_GIVEN,
        vmap=Batched(("logits_TE",)),
        sharding=Sharded((rows_of("logits_TE"),)),
    ),
    route_recording: Rules(
        flops=NO_PRODUCT,
        autocast=AS_GIVEN,
        vmap="writes to rings that last, of which there is one for all elements of a batch",
        sharding="writes to rings, which each rank has of its own tokens",
    ),
    route_replaying: Rules(
        flops=NO_PRODUCT,
        autocast=AS_GIVEN,
        vmap=EACH,
        sharding="reads the experts of its tokens, which each rank has of its own",
    ),
    quantize: Rules(
        flops=NO_PRODUCT,
        autocast=AS_GIVEN,
        vmap=Batched(("x_RD",), apart=scales_all),
        sharding=Sharded((rows_of("x_RD", apart=scales_all),)),
    ),
    dispatch: Rules(flops=NO_PRODUCT, autocast=AS_GIVEN, vmap=EACH, sharding=SORTED),
    expert_gemm: Rules(flops=gemm_flops, autocast=("x_RD", "w_EFD"), vmap=EACH, sharding=SORTED),
    activate: Rules(
        flops=NO_PRODUCT,
        autocast=AS_GIVEN,
        vmap=Batched(("y_RF",)),
        sharding=Sharded((rows_of("y_RF"),)),
    ),
    combine: Rules(flops=NO_PRODUCT, autocast=AS_GIVEN, vmap=EACH, sharding=SORTED),
    experts: Rules(
        flops=experts_flops,
        autocast=LAYER,
        vmap=Batched(ROUTED, apart=quantizes_all),
        sharding=splits(ROUTED, quantizes_all, lambda call: call),
    ),
    moe: Rules(
        flops=moe_flops,
        autocast=LAYER,
        vmap=Batched(("x_TD", "logits_TE"), apart=lambda call: quantizes_all(call.layer)),
        sharding=splits(
            ("x_TD", "logits_TE"),
            lambda call: quantizes_all(call.layer),
            lambda call: call.layer,
        ),
    ),
    experts_batched: Rules(
        flops=batched_flops, autocast=("x_EMD", "w13_EFD", "w2_EDI"), vmap=EACH, sharding=SORTED
    ),
    expert_loads: Rules(flops=NO_PRODUCT, autocast=AS_GIVEN, vmap=EACH, sharding=SORTED),
    dispatch_tokens: Rules(flops=NO_PRODUCT, autocast=AS_GIVEN, vmap=EACH, sharding=OF_RANKS),
    combine_tokens: Rules(flops=NO_PRODUCT, autocast=AS_GIVEN, vmap=EACH, sharding=OF_RANKS),
    experts_over_ranks: Rules(
        flops=lambda call: experts_flops(call.layer), autocast=LAYER, vmap=EACH, sharding=OF_RANKS
    ),
    sum_ranks: Rules(
        flops=NO_PRODUCT, autocast=AS_GIVEN, vmap=Batched(("part_TD",)), sharding=OF_RANKS
    ),
}

RULES |= {
    activate_backward: Rules(flops=NO_PRODUCT, autocast=AS_GIVEN, vmap=EACH, sharding=SORTED),
    expert_wgrad: Rules(flops=wgrad_flops, autocast=AS_GIVEN, vmap=EACH, sharding=SORTED),
    expert_wgrad_onto: Rules(
        flops=lambda call: wgrad_flops(call.wgrad),
        autocast=AS_GIVEN,
        vmap="writes to a buffer that lasts, of which there is one for all elements of a batch",
        sharding=SORTED,
    ),
    experts_saving: Rules(
        flops=lambda call: experts_flops(call.layer), autocast=LAYER, vmap=EACH, sharding=SORTED
    ),
    experts_accumulating: Rules(
        flops=lambda call: experts_flops(call.layer),
        autocast=LAYER,
        vmap=EACH,
        sharding="adds gradients to buffers of this rank, which are no DTensors",
    ),
    experts_backward: Rules(flops=backward_flops, autocast=AS_GIVEN, vmap=EACH, sharding=SORTED),
}

RULES |= {
    **{
        adapted: Rules(
            flops=adapted_flops, autocast=(*LAYER, *OF_ADAPTER), vmap=EACH, sharding=ADAPTED
        )
        for adapted in (experts_adapted, experts_adapted_saving)
    },
    experts_adapted_backward: Rules(
        flops=adapted_backward_flops, autocast=AS_GIVEN, vmap=EACH, sharding=ADAPTED
    ),
}

for _op, _rules in RULES.items():
    _op.obeys(_rules)
