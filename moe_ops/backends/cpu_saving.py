"""Experts that train on CPUs where calls have to be batch invariant: their results have the bits
that they have where nothing trains.

The stages of a layer round what is between them to 16 bits, and kernels of a whole layer do not. So
these make the result, and the first product is made once more for the backward.
"""

from __future__ import annotations

from torch import Tensor

from moe_ops.backends.by_row import NAME as BY_ROW
from moe_ops.backends.by_sequence import supports as refuse_gradients
from moe_ops.ops.experts import experts
from moe_ops.ops.experts_products import first_product
from moe_ops.ops.experts_saving import ExpertsSavingCall, experts_saving
from moe_ops.registry.invariance import invariant

AS_STAGES = "runs what the stages would round otherwise, and these give the bits of `experts` here"


def supports(call: ExpertsSavingCall) -> str | None:
    """Why the stages do as well, or nothing gives the result; or None."""
    layer = call.layer
    reason = refuse_gradients(layer)
    if reason is not None:
        return reason
    try:
        with invariant():
            first = experts.invariant("cpu", layer)[0]
    except NotImplementedError as refused:
        return str(refused)
    is_plain = layer.dtype.itemsize == 4 and not layer.w_format
    return AS_STAGES if is_plain or first.name == BY_ROW else None


@experts_saving.backend(
    "cpu",
    reads=tuple(name for name in experts_saving.optional if name != "layout"),
    supports=supports,
    devices=("cpu",),
    priority=1,
    arithmetic=lambda call: "that of `experts`",
)
def experts_and_product(call: ExpertsSavingCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`experts_saving` by a backend of `experts`, and the first product by itself."""
    _, y_RF, rows_R, ends_E = first_product(call.layer)
    out_TD: Tensor = experts.part(call.layer)
    return out_TD, y_RF, rows_R, ends_E


experts_saving.keeps_for_invariant("cpu")
