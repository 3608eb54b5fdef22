"""The norm of a few rows and the linear layers that read it; `passes/fuse_norm.py` puts it into
graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import wide
from moe_ops.decode_ops.linears import MOST_ROWS, LinearsCall, linears, shape_of
from moe_ops.decode_ops.linears import refusal as refusal_of_linears
from moe_ops.registry.spec import DECODE_OPS, op

MOST_NORMED = 8192  # columns of an input, of which a program holds a whole row


@dataclass(slots=True)
class NormedLinearsCall:
    """The arguments of `normed_linears`."""

    x_TK: Tensor
    residual_TK: Tensor | None
    gain_K: Tensor
    eps: float
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    gain_shift: float | None = None


def refusal(call: NormedLinearsCall) -> str | None:
    """Why these are no arguments of `normed_linears`, and what to do, or None."""
    x_TK, residual_TK, gain_K = call.x_TK, call.residual_TK, call.gain_K
    reason = refusal_of_linears(LinearsCall(x_TK, call.weights, call.biases))
    if reason is not None:
        return reason
    return refusal_of_norm(x_TK, residual_TK, gain_K, "`linears`")


def refusal_of_norm(
    x_TK: Tensor, residual_TK: Tensor | None, gain_K: Tensor, instead: str
) -> str | None:
    """Why rows are not normed with what reads them, or None; `instead` takes others."""
    if not 1 <= x_TK.shape[0] <= MOST_ROWS or x_TK.shape[1] > MOST_NORMED:
        wanted = f"[T, K] with T from 1 to {MOST_ROWS} and K up to {MOST_NORMED}"
        return f"x_TK is {shape_of(x_TK)}, not {wanted}; use {instead}"
    given = (("x_TK", x_TK, x_TK.shape), ("residual", residual_TK, x_TK.shape))
    for what, t, shape in (*given, ("gain", gain_K, x_TK.shape[1:])):
        if t is None:
            continue
        if t.shape != shape or t.stride(-1) != 1:
            return (
                f"the {what} is {shape_of(t)} with the strides {t.stride()}, not a contiguous "
                f"{list(shape)}; reshape it"
            )
        if (t.dtype, t.device) != (x_TK.dtype, x_TK.device):
            return (
                f"the {what} is {t.dtype} on {t.device}, x_TK {x_TK.dtype} on {x_TK.device}; "
                "convert one of them"
            )
    return None


def check(call: NormedLinearsCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"normed_linears: {reason}")


@op(check=check, table=DECODE_OPS)
def normed_linears(call: NormedLinearsCall) -> list[Tensor]:
    """[s, n, *linears(n, weights, biases)], row by row: with s = x + residual

        n = gain (s / sqrt(mean(s²) + eps))

    where s, the quotient and n are rounded to the dtype of the input, and the mean is not. With a
    `gain_shift`, as 1 of norms whose parameter is a difference from 1 or 0,

        n = (gain + gain_shift) (s / sqrt(mean(s²) + eps))

    of which the gain, its sum and the quotient are in float32, and n alone is rounded. Without a
    residual s is x, and not returned. The gain may be read as early as weights are by `linears`.
    Raises ValueError for what `refusal` names.
    """
    first, n_TK = normed(call.x_TK, call.residual_TK, call.gain_K, call.eps, call.gain_shift)
    return [*first, n_TK, *linears.body(LinearsCall(n_TK, call.weights, call.biases))]


def normed(
    x_TK: Tensor, residual_TK: Tensor | None, gain_K: Tensor, eps: float, gain_shift: float | None
) -> tuple[list[Tensor], Tensor]:
    """([s], n) as `normed_linears` has them; ([], n) without a residual."""
    s_TK = x_TK if residual_TK is None else x_TK + residual_TK
    wide_TK = wide(s_TK)
    quotient_TK = wide_TK * torch.rsqrt(wide_TK.pow(2).mean(-1, keepdim=True) + eps)
    if gain_shift is None:
        n_TK = gain_K * quotient_TK.to(x_TK.dtype)
    else:
        n_TK = (quotient_TK * (wide(gain_K) + gain_shift)).to(x_TK.dtype)
    return [] if residual_TK is None else [s_TK], n_TK


normed_linears.fake(fake_impls.normed_linears)
