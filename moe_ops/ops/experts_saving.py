"""`experts` with what its backward reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.ops.activate import activate
from moe_ops.ops.combine import combine
from moe_ops.ops.experts import ExpertsCall, restored
from moe_ops.ops.experts import check as check_experts
from moe_ops.ops.experts_products import first_product, second_product
from moe_ops.registry.invariance import by_parts
from moe_ops.registry.spec import op

# The arguments of `experts` of which there are no gradients: its inputs are rounded then.
ROUNDED = ("x_format", "x_scale", "h_scale", "x_scale_TG", "out_dtype")
LAYER = tuple(f.name for f in fields(ExpertsCall) if f.name not in ROUNDED)


@dataclass(slots=True)
class ExpertsSavingCall:
    """The arguments of `experts_saving`: a call of `experts` on inputs that are not rounded."""

    layer: ExpertsCall

    FLAT: ClassVar[dict[str, str]] = {name: f"layer.{name}" for name in LAYER}


def check(call: ExpertsSavingCall) -> None:
    """Raise ValueError or TypeError unless `experts_saving` takes these arguments."""
    check_experts(call.layer)


@op(check=check, arithmetic=by_parts)
def experts_saving(call: ExpertsSavingCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `experts`, and keep what its gradients are made of. Returns (out_TD, y_RF, rows_R,
    ends_E).

    out_TD is the result of `experts` for the same arguments, which are its own, less those that
    round the inputs. y_RF is the result of the first product, before the activation; rows_R and
    ends_E are the order of its rows, as `dispatch` gives them; what y_RF holds in unused rows is
    unspecified. Nothing of a row's width D is kept: `experts_backward` needs the tokens, which the
    caller has, and y_RF.

    Raises ValueError or TypeError as `experts` does.
    """
    c = call.layer if not call.layer.layout else restored(call.layer)
    _, y_RF, rows_R, ends_E = first_product(c)
    y_RD = second_product(c, activate(y_RF, *c.activation), rows_R, ends_E)
    return combine(y_RD, c.weights_TK, rows_R), y_RF, rows_R, ends_E


experts_saving.fake(fake_impls.experts_saving)
