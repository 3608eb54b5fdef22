"""`experts` added to a residual; `passes/fuse_residual.py` puts it into graphs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.ops.experts import OF_CODES, ExpertsCall, experts
from moe_ops.ops.experts import check as check_experts
from moe_ops.registry.spec import DECODE_OPS, op

# The arguments of `experts` on floats.
LAYER = tuple(f.name for f in fields(ExpertsCall) if f.name not in OF_CODES)


@dataclass(slots=True)
class ExpertsOntoCall:
    """The arguments of `experts_onto`: a residual, and a call of `experts`."""

    residual_TD: Tensor
    layer: ExpertsCall

    FLAT: ClassVar[dict[str, str]] = {
        "residual_TD": "residual_TD",
        **{name: f"layer.{name}" for name in LAYER},
    }


def check(call: ExpertsOntoCall) -> None:
    """Raise ValueError or TypeError unless `experts_onto` takes these arguments."""
    kinds = [(tuple(t.shape), t.dtype, t.device) for t in (call.residual_TD, call.layer.x_TD)]
    if kinds[0] != kinds[1]:
        said = ["{} of {} on {}".format(*kind) for kind in kinds]
        raise ValueError(f"experts_onto: the residual is {said[0]}, x_TD {said[1]}; convert one")
    check_experts(call.layer)


@op(check=check, table=DECODE_OPS)
def experts_onto(call: ExpertsOntoCall) -> Tensor:
    """residual + experts(x, ...), of which the second is rounded before they are added. [T, D].

    residual_TD: as x_TD is; all else as `experts` takes it. On a GPU the last launch of the experts
    adds. Raises ValueError or TypeError as `experts` does, and for another residual.
    """
    return call.residual_TD + experts.part(call.layer)


experts_onto.fake(fake_impls.experts_onto)
