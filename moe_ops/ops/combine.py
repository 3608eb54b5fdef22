"""Combine: the weighted sum of each token's expert outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import (
    FLOATS,
    check_devices,
    check_float,
    check_size,
    check_tensor,
    wide_dtype,
)
from moe_ops.registry.formulas import Formula, Gradients
from moe_ops.registry.invariance import INVARIANT
from moe_ops.registry.spec import op
from moe_ops.registry.watched import readable


@dataclass(slots=True)
class CombineCall:
    """The arguments of `combine`."""

    y_RD: Tensor
    weights_TK: Tensor
    rows_R: Tensor


def check(call: CombineCall) -> None:
    """Raise ValueError or TypeError unless `combine` takes these arguments."""
    y_RD, weights_TK, rows_R = call.y_RD, call.weights_TK, call.rows_R
    if (
        y_RD.dim() == weights_TK.dim() == 2
        and rows_R.dim() == 1
        and y_RD.dtype in FLOATS
        and weights_TK.dtype in FLOATS
        and rows_R.dtype is torch.int32
        and y_RD.shape[0] == rows_R.shape[0] == weights_TK.numel()
        and y_RD.device == weights_TK.device == rows_R.device
    ):
        return  # the common call, accepted in half a microsecond
    check_float("y_RD", y_RD, 2)
    check_float("weights_TK", weights_TK, 2, y_RD)
    check_tensor("rows_R", rows_R, 1, (torch.int32,))
    R = weights_TK.shape[0] * weights_TK.shape[1]
    check_size("y_RD", y_RD, 0, R, "tokens times top-k of weights_TK")
    check_size("rows_R", rows_R, 0, R, "tokens times top-k of weights_TK")
    check_devices(y_RD, weights_TK=weights_TK, rows_R=rows_R)


def arithmetic(call: CombineCall) -> str:
    """That of the definition: a sum over an axis that is as long for any number of tokens."""
    return "products as dtypes promote, summed in float32 by PyTorch over an axis of choices"


@op(check=check, arithmetic=arithmetic)
def combine(call: CombineCall) -> Tensor:
    """Sum each token's expert outputs: out_TD[t] = sum_k weights_TK[t, k] * y_RD[r(t, k)].

    r(t, k) is the row with rows_R[r] = t * K + k. A pair with no row adds nothing, and a row with
    rows_R = -1, or of any pair that is not there, is never read, so it may hold anything, NaN
    included. The product is rounded as the
    dtypes promote: bfloat16 outputs with float32 weights give float32 products, with bfloat16
    weights bfloat16 products, as models trained either way expect. The sum is taken in float32 and
    rounded to y's dtype. T = 0 gives an empty result.

    y_RD: float [R, D]; weights_TK: float [T, K]; rows_R: int32 [R = T * K]; result [T, D] in y's
    dtype. Raises ValueError or TypeError for wrong shapes, dtypes or devices.
    """
    y_RD, weights_TK, rows_R = call.y_RD, call.weights_TK, call.rows_R
    T, K = weights_TK.shape
    R = T * K
    # Slot R takes what the unused rows would write.
    row_of_pair = torch.full((R + 1,), -1, dtype=torch.int64, device=y_RD.device)
    target = rows_R.long().clamp(-1, R) % (R + 1)
    row_of_pair = row_of_pair.scatter(0, target, torch.arange(R, device=y_RD.device))[:R]
    unused = (row_of_pair < 0).view(T, K, 1)
    y_TKD = y_RD[row_of_pair.clamp(min=0)].view(T, K, y_RD.shape[1])
    weights_TK1 = weights_TK[..., None]
    # Where the host may look, the copy that a mask takes is made for pairs without a row alone. It
    # is one of both factors: of what either holds there, the gradient of the other would be made.
    if not readable(rows_R) or bool(unused.any()):
        y_TKD, weights_TK1 = y_TKD.masked_fill(unused, 0.0), weights_TK1.masked_fill(unused, 0.0)
    return (y_TKD * weights_TK1).sum(1, dtype=wide_dtype(y_RD)).to(y_RD.dtype)


def _backward(
    call: CombineCall,
    saved: list[Tensor],
    grads: tuple[Tensor | None, ...],
    wanted: frozenset[str],
) -> Gradients:
    """The gradients of the definition, whatever made the sum."""
    (grad_TD,) = grads
    if grad_TD is None:
        return {}
    y_RD, weights_TK = call.y_RD, call.weights_TK
    twice = torch.is_grad_enabled()  # the gradient of the gradient is wanted, too
    with torch.enable_grad():
        if not twice:
            y_RD, weights_TK = y_RD.detach(), weights_TK.detach()
        of = {"y_RD": y_RD, "weights_TK": weights_TK}
        of = {name: t if twice else t.requires_grad_() for name, t in of.items() if name in wanted}
        out_TD = combine.body(CombineCall(y_RD, weights_TK, call.rows_R))
        found = torch.autograd.grad(out_TD, [*of.values()], grad_TD, create_graph=twice)
    return dict(zip(of, found, strict=True))


# A backend without gradients makes the sum of invariant calls, in training as elsewhere.
combine.differentiated(
    Formula(
        takes=lambda call: INVARIANT.get(),
        forward=lambda call: (combine.part(call),),
        backward=_backward,
    )
)
combine.fake(fake_impls.combine)
