"""The gradient of expert weights, added to a float32 buffer that lasts over several backwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import check_no_double
from moe_ops.ops.expert_wgrad import ExpertWgradCall, expert_wgrad
from moe_ops.ops.expert_wgrad import check as check_wgrad
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.spec import op


@dataclass(slots=True)
class ExpertWgradOntoCall:
    """The arguments of `expert_wgrad_onto`: a call of `expert_wgrad`, and where it is added."""

    wgrad: ExpertWgradCall
    main_grad_EMN: Tensor

    MUTATED: ClassVar[tuple[str, ...]] = ("main_grad_EMN",)
    FLAT: ClassVar[dict[str, str]] = {
        **{name: f"wgrad.{name}" for name in ("a_RM", "b_RN", "ends_E")},
        "main_grad_EMN": "main_grad_EMN",
        **{name: f"wgrad.{name}" for name in ("a_rows_R", "b_rows_R")},
    }

    @property
    def sum_EMN(self) -> Tensor:
        """main_grad_EMN to be written to. Its version stays as it is, by which autograd would
        refuse the backward of a graph whose forward ran before another's backward: sums may be
        added in any order."""
        return self.main_grad_EMN.data


def check(call: ExpertWgradOntoCall) -> None:
    """Raise ValueError or TypeError unless `expert_wgrad_onto` takes these arguments."""
    c = call.wgrad
    check_wgrad(c)
    check_no_double("a_RM", c.a_RM, "float32 sums")
    sizes = (c.ends_E.shape[0], c.a_RM.shape[1], c.b_RN.shape[1])
    check_main_grad("main_grad_EMN", call.main_grad_EMN, sizes, c.a_RM.device)
    if needs_grad(c.a_RM, c.b_RN):
        raise ValueError(
            "expert_wgrad_onto adds to memory, which has no gradient, and got a_RM or b_RN that "
            "requires grad; call it under torch.no_grad(), or take expert_wgrad"
        )


def check_main_grad(
    name: str, t: Tensor, shape: tuple[int, ...] | torch.Size, device: torch.device
) -> None:
    """Raise ValueError unless a gradient of this shape can be added to `t` as it lies."""
    got = None
    if tuple(t.shape) != tuple(shape):
        got = f"the shape {tuple(t.shape)}"
    elif t.dtype is not torch.float32:
        got = str(t.dtype)
    elif t.device != device:
        got = f"a tensor on {t.device}"
    elif not t.is_contiguous():
        got = f"the strides {t.stride()}"
    elif t.requires_grad:
        got = "a tensor that requires grad"
    if got is not None:
        raise ValueError(
            f"{name} must be a contiguous float32 tensor {tuple(shape)} on {device} without "
            f"gradient, got {got}; make it by torch.zeros of the weight's shape, in float32"
        )


@op(check=check)
def expert_wgrad_onto(call: ExpertWgradOntoCall) -> None:
    """Add the gradient of expert weights: main_grad_EMN[e] += sum over r of e: a[r] b[r]^T.

    The sum is the result of `expert_wgrad` in float32 for the same arguments, which are its own. It
    is taken first, and then added, rounded once to float32: so n calls give the bits of n results
    that are added in turn. What an expert without rows has stays as it is. No result of the size of
    the weight is made: a program adds its tile where it lies, or an expert's product is added.

    a_RM, b_RN, ends_E, a_rows_R, b_rows_R: as `expert_wgrad` takes them, in float32, bfloat16 or
    float16; main_grad_EMN: float32 [E, M, N], contiguous, written in place.

    Raises ValueError or TypeError for wrong shapes, dtypes or devices, and where a gradient of
    a_RM or b_RN is wanted, as there is none.

    This definition makes the result of `expert_wgrad`, in float32.
    """
    call.sum_EMN.add_(expert_wgrad.part(replace(call.wgrad, out_dtype="float32")))


expert_wgrad_onto.fake(fake_impls.expert_wgrad_onto)
