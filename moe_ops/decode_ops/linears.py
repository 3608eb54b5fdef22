"""Linear layers of one input with few rows; `passes/merge_linears.py` puts it into graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from moe_ops import fake_impls
from moe_ops.checks.shapes import DOUBLE
from moe_ops.registry.spec import DECODE_OPS, op

MOST_ROWS = 64  # of the input
MOST_TILED = 512  # of codes in tiles; of more it is faster to decode them first
DTYPES = (torch.bfloat16, torch.float16)  # and float64, by the definition


@dataclass(slots=True)
class LinearsCall:
    """The arguments of `linears`."""

    x_TK: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]


def refusal(call: LinearsCall) -> str | None:
    """Why these are no arguments of `linears`, and what to do, or None."""
    x_TK, weights, biases = call.x_TK, call.weights, call.biases
    if x_TK.dim() != 2 or not 1 <= x_TK.shape[0] <= MOST_ROWS or x_TK.shape[1] == 0:
        return (
            f"x_TK is {shape_of(x_TK)}, not [T, K] with T from 1 to {MOST_ROWS}; use torch's linear"
        )
    if x_TK.dtype not in (*DTYPES, DOUBLE):
        return f"x_TK is {x_TK.dtype}, not bfloat16 or float16; use torch's linear"
    if x_TK.stride(1) != 1:
        return f"x_TK has the strides {x_TK.stride()}; make it contiguous"
    if not weights or len(biases) != len(weights):
        return f"got {len(weights)} weights and {len(biases)} biases; give a bias or None for each"
    for g, (w_NK, b_N) in enumerate(zip(weights, biases, strict=True)):
        if w_NK.dim() != 2 or w_NK.shape[1] != x_TK.shape[1] or w_NK.shape[0] == 0:
            return f"weight {g} is {shape_of(w_NK)}, not [N, {x_TK.shape[1]}]; give weights of x_TK"
        if not w_NK.is_contiguous():
            return f"weight {g} has the strides {w_NK.stride()}; make it contiguous"
        if b_N is not None and b_N.shape != w_NK.shape[:1]:
            return f"bias {g} is {shape_of(b_N)}, not [{w_NK.shape[0]}]; give a number for each row"
        if b_N is not None and not b_N.is_contiguous():
            return f"bias {g} has the strides {b_N.stride()}; make it contiguous"
        for what, t in (("weight", w_NK), ("bias", b_N)):
            if t is not None and (t.dtype, t.device) != (x_TK.dtype, x_TK.device):
                return (
                    f"{what} {g} is {t.dtype} on {t.device}, x_TK {x_TK.dtype} on {x_TK.device}; "
                    "convert one of them"
                )
    return None


def check(call: LinearsCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"linears: {reason}")


@op(check=check, table=DECODE_OPS)
def linears(call: LinearsCall) -> list[Tensor]:
    """[y_g] with y_g = x W_gᵀ + b_g, for weights [N_g, K] and biases [N_g] or None.

    Sums are in float32, rounded once to the dtype of the input. On a GPU it is one launch for four
    weights, which may be read, as biases may, ahead of the end of the launch before: what writes
    them must have ended two launches ago, as for parameters it has. Raises ValueError for what
    `refusal` names.
    """
    given = zip(call.weights, call.biases, strict=True)
    return [linear(call.x_TK, w_NK, b_N) for w_NK, b_N in given]


linears.fake(fake_impls.linears)


def shape_of(t: Tensor) -> list[int]:
    return list(t.shape)
