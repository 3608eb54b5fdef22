"""The backward of the activation, and what the gradients around it need of the same rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import check_devices, check_float, check_size, check_tensor, wide
from moe_ops.ops.activate import check_activation
from moe_ops.registry.spec import op


@dataclass(slots=True)
class ActivateBackwardCall:
    """The arguments of `activate_backward`."""

    dh_RI: Tensor
    y_RF: Tensor
    weights_TK: Tensor
    rows_R: Tensor
    kind: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0
    for_weights: bool = True


def check(call: ActivateBackwardCall) -> None:
    """Raise ValueError or TypeError unless `activate_backward` takes these arguments."""
    dh_RI, y_RF, weights_TK, rows_R = call.dh_RI, call.y_RF, call.weights_TK, call.rows_R
    check_float("y_RF", y_RF, 2)
    check_tensor("dh_RI", dh_RI, 2, (y_RF.dtype,), "convert it to the dtype of y_RF")
    check_float("weights_TK", weights_TK, 2, y_RF)
    check_tensor("rows_R", rows_R, 1, (torch.int32,))
    check_activation(call)
    F = y_RF.shape[1]
    if call.gated and F % 2:
        raise ValueError(
            f"a gated activation halves the width of y_RF, which is odd: {tuple(y_RF.shape)}"
        )
    R = weights_TK.shape[0] * weights_TK.shape[1]
    check_size("y_RF", y_RF, 0, R, "tokens times top-k of weights_TK")
    check_size("dh_RI", dh_RI, 0, R, "tokens times top-k of weights_TK")
    check_size("rows_R", rows_R, 0, R, "tokens times top-k of weights_TK")
    check_size("dh_RI", dh_RI, 1, F // 2 if call.gated else F, "the width after the activation")
    check_devices(dh_RI, y_RF=y_RF, weights_TK=weights_TK, rows_R=rows_R)


@op(check=check)
def activate_backward(call: ActivateBackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate out = sum_k w_tk h_tk by y and w, where h = activate(y). Returns (dy_RF,
    wh_RI, dweights_TK).

        dy_RF[r]            w * dh_RI[r] times the derivative of the activation at y_RF[r]
        wh_RI[r]            w * h, from which the gradient of the second weight is made
        dweights_TK[t, k]   the sum over the row of dh_RI[r] * h

    where w = weights_TK[t, k] of the pair t * K + k = rows_R[r], as `dispatch` numbers rows, and
    dh_RI is the gradient by h of a token's unweighted result. So nothing of the model's width has
    to be kept for the gradient of the weights. h is computed again. Rows with rows_R = -1 are
    unused: they may hold NaN, and what the results hold there is unspecified; a pair without a row
    has a gradient of 0. At a limit the gradient is that of torch.clamp: 1 where both meet.

    All is computed in float32; dy_RF and wh_RI are rounded once to y's dtype, and dweights_TK stays
    float32. With for_weights=False wh_RI is empty, [0, I].

    dh_RI: [R, I] and y_RF: [R, F], one float dtype, R = T * K; weights_TK: float [T, K]; rows_R:
    int32 [R]; all else as `activate` takes it. Raises ValueError or TypeError for wrong shapes,
    dtypes, devices or parameters.

    Source of the gradient by weights without the second product's result: SonicMoE,
    arXiv:2512.14080.
    """
    weights_TK, used_R1, dtype = call.weights_TK, (call.rows_R >= 0)[:, None], call.y_RF.dtype
    pair_R = call.rows_R.clamp(min=0).long()
    # Of what unused rows hold, no gradient may be made: neither theirs, nor that of a weight.
    y, dh_RI = (torch.where(used_R1, wide(t), 0.0) for t in (call.y_RF, call.dh_RI))
    weight_R1 = torch.where(used_R1, wide(weights_TK).reshape(-1)[pair_R][:, None], 0.0)
    gate, up = _halves(y, call)
    f, df = _with_derivative(gate if call.limit is None else gate.clamp(max=call.limit), call)
    if call.limit is not None:
        df = df * (gate <= call.limit)
    wdh_RI = weight_R1 * dh_RI
    if up is None:
        h_RI, dy_RF = f, wdh_RI * df
    else:
        passes = None
        if call.limit is not None:
            passes = (up >= -call.limit) & (up <= call.limit)
            up = up.clamp(-call.limit, call.limit)
        up = up + call.up_shift
        h_RI, dgate, dup = f * up, wdh_RI * df * up, wdh_RI * f
        dup = dup if passes is None else dup * passes
        halves = (dgate, dup)
        dy_RF = torch.stack(halves, -1).flatten(1) if call.interleaved else torch.cat(halves, 1)
    wh_RI = weight_R1 * h_RI if call.for_weights else h_RI.new_empty(0, h_RI.shape[1])
    dweights_TK = by_pair((dh_RI * h_RI).sum(1), call.rows_R, weights_TK)
    return dy_RF.to(dtype), wh_RI.to(dtype), dweights_TK


def by_pair(values_R: Tensor, rows_R: Tensor, like_TK: Tensor) -> Tensor:
    """What each row has as what each pair of a token and a choice has: [T, K], 0 for pairs that
    have no row."""
    R = rows_R.shape[0]
    # Slot R takes what unused rows would write.
    slot_R = torch.where(rows_R >= 0, rows_R, R).long()
    return values_R.new_zeros(R + 1).scatter(0, slot_R, values_R)[:R].view(like_TK.shape)


def _halves(y_RF: Tensor, call: ActivateBackwardCall) -> tuple[Tensor, Tensor | None]:
    """What the activation takes, and what it multiplies that by, if it is gated."""
    if not call.gated:
        return y_RF, None
    if call.interleaved:
        return y_RF[:, ::2], y_RF[:, 1::2]
    gate, up = y_RF.chunk(2, dim=-1)
    return gate, up


def _with_derivative(g: Tensor, call: ActivateBackwardCall) -> tuple[Tensor, Tensor]:
    """f(g) and f'(g) of the activation's kind."""
    if call.kind == "silu":
        s = torch.sigmoid(call.alpha * g)
        return g * s, s * (1 + call.alpha * g * (1 - s))
    if call.kind == "gelu":
        phi = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
        return g * phi, phi + g * torch.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))
    if call.kind == "gelu_tanh":
        c, k = math.sqrt(2 / math.pi), 0.044715
        t = torch.tanh(c * (g + k * g**3))
        return 0.5 * g * (1 + t), 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * c * (1 + 3 * k * g * g)
    r = g.clamp(min=0)
    return r * r, 2 * r


activate_backward.fake(fake_impls.activate_backward)
