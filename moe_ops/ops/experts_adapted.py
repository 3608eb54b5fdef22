"""The experts with adapters of their weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.ops.activate import activate
from moe_ops.ops.adapters import Adapter, AdapterRows, check_adapter, flat
from moe_ops.ops.combine import combine
from moe_ops.ops.experts import OF_CODES, ExpertsCall, restored
from moe_ops.ops.experts import check as check_experts
from moe_ops.ops.experts_products import first_product, second_product
from moe_ops.registry.spec import op

# The arguments of `experts` on floats.
LAYER = tuple(f.name for f in fields(ExpertsCall) if f.name not in OF_CODES)


@dataclass(slots=True)
class ExpertsAdaptedCall:
    """The arguments of `experts_adapted`: a call of `experts` on floats, and adapters."""

    layer: ExpertsCall
    adapter: Adapter

    FLAT: ClassVar[dict[str, str]] = flat(LAYER)


def check(call: ExpertsAdaptedCall) -> None:
    """Raise ValueError or TypeError unless `experts_adapted` takes these arguments."""
    check_experts(call.layer)
    check_adapter(call.adapter, call.layer)


@op(check=check)
def experts_adapted(call: ExpertsAdaptedCall) -> Tensor:
    """Run `experts` with an adapter added to each weight, never to the weight itself:
    W13_e x becomes W13_e x + B13_g (s_n A13_g x), and W2_e h becomes W2_e h + B2_g (s_n A2_g h).

    n = adapter_T[t] is the adapter of token t and g = n * E + e the group of a pair of token and
    expert e, as it is numbered here. A token whose n is -1, or any other that is none of the N
    adapters, has none: its result is that of `experts` by the same stages, to the bit. Without
    adapter_T all tokens have adapter 0. A row's result depends on that row alone, as in `experts`.

    scale_N: float32 [N], the factors s_n; a13_GrD: [G, r, D] and b13_GFr: [G, F, r], with rows in
    the order of those of the weight; a2_GrI: [G, r, I] and b2_GDr: [G, D, r], where G = N * E; of
    x's dtype, any strides. One pair may be missing, and ranks of both may differ. adapter_T: int32
    or int64 [T]. All else is as `experts` takes it; the weights may be transposed, which A and B
    never are. Result [T, D] in x's dtype.

    s A x and s A h are rounded to x's dtype, as rows between products are; with an x_format the
    adapters multiply what is not quantised. Weights of every format stay as they are. Gradients
    reach x_TD, weights_TK, all of A and B, and weights and biases that are floats.

    Raises ValueError or TypeError as `experts` does, and for adapters that do not fit the layer.
    """
    c, adapter = call.layer if not call.layer.layout else restored(call.layer), call.adapter
    x_RD, y_RF, rows_R, ends_E = first_product(c)
    rows = AdapterRows.of(adapter, rows_R, ends_E, c.ids_TK.shape[1])
    if adapter.a13_GrD is not None and adapter.b13_GFr is not None:
        if c.x_format:
            x_RD = c.x_TD[rows_R.clamp(min=0).long() // c.ids_TK.shape[1]]
        y_RF = rows.added(y_RF, rows.narrow(x_RD, adapter.a13_GrD), adapter.b13_GFr)
    h_RI = activate(y_RF, *c.activation)
    y_RD = second_product(c, h_RI, rows_R, ends_E)
    if adapter.a2_GrI is not None and adapter.b2_GDr is not None:
        y_RD = rows.added(y_RD, rows.narrow(h_RI, adapter.a2_GrI), adapter.b2_GDr)
    return combine(y_RD, c.weights_TK, rows_R)


experts_adapted.fake(fake_impls.experts_adapted)
