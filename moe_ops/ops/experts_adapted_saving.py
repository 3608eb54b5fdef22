"""`experts_adapted` with what its backward reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.ops.activate import activate
from moe_ops.ops.adapters import Adapter, AdapterRows, check_adapter, flat
from moe_ops.ops.combine import combine
from moe_ops.ops.experts import ExpertsCall, restored
from moe_ops.ops.experts import check as check_experts
from moe_ops.ops.experts_products import first_product, second_product
from moe_ops.ops.experts_saving import LAYER
from moe_ops.registry.spec import op


@dataclass(slots=True)
class ExpertsAdaptedSavingCall:
    """The arguments of `experts_adapted_saving`: a call of `experts` on inputs that are not
    rounded, and adapters."""

    layer: ExpertsCall
    adapter: Adapter

    FLAT: ClassVar[dict[str, str]] = flat(LAYER)


def check(call: ExpertsAdaptedSavingCall) -> None:
    """Raise ValueError or TypeError unless `experts_adapted_saving` takes these arguments."""
    check_experts(call.layer)
    check_adapter(call.adapter, call.layer)


@op(check=check)
def experts_adapted_saving(
    call: ExpertsAdaptedSavingCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `experts_adapted`, and keep what its gradients are made of. Returns (out_TD, y_RF,
    u13_Rr, wu2_Rr, rows_R, ends_E).

    As `experts_saving` does, whose arguments it takes, with adapters behind the weights: y_RF is
    the result of the first product with its adapter added, u13_Rr is s A13 x of each row, and
    wu2_Rr is w s A2 h, with w the row's routing weight; 0 of a row without an adapter, in x's
    dtype; of a pair of adapters that is missing [R, 0]. What y_RF, u13_Rr and wu2_Rr hold in unused
    rows is unspecified.

    Raises ValueError or TypeError as `experts_adapted` does.
    """
    c, adapter = call.layer if not call.layer.layout else restored(call.layer), call.adapter
    x_RD, y_RF, rows_R, ends_E = first_product(c)
    rows = AdapterRows.of(adapter, rows_R, ends_E, c.ids_TK.shape[1])
    u13_Rr = wu2_Rr = x_RD.new_empty(x_RD.shape[0], 0)
    if adapter.a13_GrD is not None and adapter.b13_GFr is not None:
        u13_Rr = rows.narrow(x_RD, adapter.a13_GrD)
        y_RF = rows.added(y_RF, u13_Rr, adapter.b13_GFr)
    h_RI = activate(y_RF, *c.activation)
    y_RD = second_product(c, h_RI, rows_R, ends_E)
    if adapter.a2_GrI is not None and adapter.b2_GDr is not None:
        u2_Rr = rows.narrow(h_RI, adapter.a2_GrI)
        y_RD = rows.added(y_RD, u2_Rr, adapter.b2_GDr)
        weight_R = c.weights_TK.reshape(-1)[rows_R.clamp(min=0)]
        wu2_Rr = (u2_Rr * weight_R[:, None]).to(u2_Rr.dtype)
    return combine(y_RD, c.weights_TK, rows_R), y_RF, u13_Rr, wu2_Rr, rows_R, ends_E


experts_adapted_saving.fake(fake_impls.experts_adapted_saving)
