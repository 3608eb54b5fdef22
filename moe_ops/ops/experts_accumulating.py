"""`experts` whose backward adds the gradients of weights to float32 buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.ops.expert_wgrad_onto import check_main_grad
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.experts import check as check_experts
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import by_parts
from moe_ops.registry.spec import op
from moe_ops.registry.watched import transforms

# The arguments of `experts` on weights that train, which are no codes, and on inputs as they are.
LAYER = (
    "x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED", "expert_map",
    "transposed", "kind", "gated", "interleaved", "alpha", "limit", "up_shift", "expert_offset",
)  # fmt: skip


@dataclass(slots=True)
class ExpertsAccumulatingCall:
    """The arguments of `experts_accumulating`: a call of `experts` on floats, and what the
    gradients of its weights are added to."""

    layer: ExpertsCall
    main_grad13_EFD: Tensor | None = None
    main_grad2_EDI: Tensor | None = None

    FLAT: ClassVar[dict[str, str]] = {
        **{name: f"layer.{name}" for name in LAYER},
        **{name: name for name in ("main_grad13_EFD", "main_grad2_EDI")},
    }


def check(call: ExpertsAccumulatingCall) -> None:
    """Raise ValueError or TypeError unless `experts_accumulating` takes these arguments."""
    c = call.layer
    check_experts(c)
    if transforms() and needs_grad(c.x_TD, c.weights_TK, c.w13_EFD, c.w2_EDI):
        raise ValueError(
            "experts_accumulating adds to memory in its backward, and transforms of torch.func "
            "have no such gradients; call experts in functions that they differentiate"
        )
    for name, grad, weight in (
        ("main_grad13_EFD", call.main_grad13_EFD, c.w13_EFD),
        ("main_grad2_EDI", call.main_grad2_EDI, c.w2_EDI),
    ):
        if grad is not None:
            check_main_grad(name, grad, weight.shape, weight.device)


@op(check=check, arithmetic=by_parts)
def experts_accumulating(call: ExpertsAccumulatingCall) -> Tensor:
    """Run `experts`; a backward adds the gradients of weights to main_grad13_EFD and
    main_grad2_EDI, and gives none of these weights.

    The result, and the gradients of all else, are those of `experts` for the same arguments. That
    of a weight is summed in float32 and added in float32, by `expert_wgrad_onto`: it is never
    rounded to the weight's dtype, and no tensor is made for it. Every backward adds: one that is
    run again, too, and one by torch.autograd.grad for other tensors. A weight whose main_grad is
    None, and biases, have gradients as usual.

    main_grad13_EFD and main_grad2_EDI: contiguous float32 tensors of the weights' shapes.

    Raises ValueError or TypeError as `experts` does, and ValueError for a main_grad of another
    dtype, shape or device, under transforms of torch.func, in a backward that itself is to be
    differentiated (create_graph=True), and where `moe_ops.using` forces a backend of this op.
    """
    c = call.layer
    if needs_grad(c.w13_EFD, c.w2_EDI):
        raise ValueError(
            "experts_accumulating adds to main_grad by a formula of its own, which a forced "
            "backend has not; name other ops in moe_ops.using, or leave it out where you train"
        )
    out: Tensor = experts.part(c)
    return out


experts_accumulating.fake(fake_impls.experts_accumulating)
