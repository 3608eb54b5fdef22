"""Experts that train on NVIDIA GPUs where calls have to be batch invariant: their results have the
bits that they have where nothing trains.

The products that a backward needs round what is between them to 16 bits, and those of `experts` do
not. So these make the result, and the first product is made once more for the backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops.backends.triton import (
    call_of,
    formats_named,
    layer_of,
    of_adapter,
    parts_of,
    supports_many,
    tensors_of,
)
from moe_ops.backends.triton_ahead import Before, compiles_ahead
from moe_ops.backends.triton_decoded import READS
from moe_ops.backends.triton_hopper import refused_products
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.experts_saving import ExpertsSavingCall, experts_saving

NAME = "triton.twice"
Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def supports(call: ExpertsSavingCall) -> str | None:
    """Why no kernel makes the first product again, or nothing gives the result; or None."""
    layer = call.layer
    refusal = supports_many(layer)
    if refusal is not None:
        return refusal
    try:
        experts.invariant(layer.x_TD.device.type, layer)
    except NotImplementedError as refused:
        return str(refused)
    return None


@experts_saving.backend(
    NAME, reads=READS, supports=supports, devices=("cuda",), priority=2,
    arithmetic=lambda call: "that of `experts`",
)  # fmt: skip
def launch_saving(call: ExpertsSavingCall) -> Four:
    """`experts_saving` by a backend of `experts`, and the first product by itself."""
    return _saving(call)


def _saving(call: ExpertsSavingCall, before: Before = None) -> Four:
    y_RF, rows_R, ends_E = _first(call.layer, before)
    # Without the dispatcher, which shadows of tensors do not come through.
    out_TD: Tensor = experts.pick(call.layer).run(call.layer)
    return out_TD, y_RF, rows_R, ends_E


def _first(c: ExpertsCall, before: Before) -> Three:
    from moe_ops.kernels.triton.replay import replay

    rest = (c.transposed, c.activation, formats_named(c))
    return replay(_launch_first, (*tensors_of(c), *of_adapter(None)), rest, before)


def _launch_first(*given: Any) -> Three:
    from moe_ops.kernels.triton.experts.training import first_rows

    named, _, rest = parts_of(given)
    up, _ = refused_products(call_of(named, *rest), activates=False)
    routed = named["x_TD"], named["ids_TK"], named["expert_map"]
    return first_rows(*routed, layer_of(named, *rest), up is None)


experts_saving.keeps_for_invariant(NAME)
compiles_ahead(experts_saving, NAME, _saving)
