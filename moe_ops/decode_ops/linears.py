"""Several linear layers of one input with few rows, as one op; `passes/merge_linears.py` calls it.

No stage of a Mixture-of-Experts layer, so not in the registry of those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

MOST_ROWS = 64  # of the input
MOST_NORMED = 8192  # columns of an input of which every program holds all
DTYPES = (torch.bfloat16, torch.float16)


@torch.library.custom_op("moe_ops::linears", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def linears(
    x_TK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """[y_g] with y_g = x W_gᵀ + b_g, for weights [N_g, K] and biases [N_g] or None.

    Sums are in float32, rounded once to the dtype of the input. On a GPU it is one launch for four
    weights, which may be read ahead of the end of the launch before: what writes them must have
    ended two launches ago, as for parameters it has. Raises ValueError for what `refusal` names.
    """
    _check(x_TK, weights, biases)
    if x_TK.is_cuda:
        from moe_ops.kernels.triton.decode.linears import run

        return run(x_TK, weights, biases)
    return [linear(x_TK, w_NK, b_N) for w_NK, b_N in zip(weights, biases, strict=True)]


@linears.register_fake
def _(x_TK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    _check(x_TK, weights, biases)
    return [x_TK.new_empty(x_TK.shape[0], w_NK.shape[0]) for w_NK in weights]


@torch.library.custom_op(
    "moe_ops::normed_linears", mutates_args=(), tags=(torch.Tag.needs_exact_strides,)
)
def normed_linears(
    x_TK: Tensor,
    residual_TK: Tensor | None,
    gain_K: Tensor,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    """[s, n, *linears(n, weights, biases)] of one row: with s = x + residual

        n = gain (s / sqrt(mean(s²) + eps))

    where s, the quotient and n are rounded to the dtype of the input, and the mean is not. Without
    a residual s is x, and not returned. Raises ValueError for what `norm_refusal` names.
    """
    _check_norm(x_TK, residual_TK, gain_K, weights, biases)
    if x_TK.is_cuda:
        from moe_ops.kernels.triton.decode.linears import run_normed

        return run_normed(x_TK, residual_TK, gain_K, eps, weights, biases)
    s_TK = x_TK if residual_TK is None else x_TK + residual_TK
    wide_TK = s_TK.float()
    quotient_TK = wide_TK * torch.rsqrt(wide_TK.pow(2).mean(-1, keepdim=True) + eps)
    n_TK = gain_K * quotient_TK.to(x_TK.dtype)
    ys = [linear(n_TK, w_NK, b_N) for w_NK, b_N in zip(weights, biases, strict=True)]
    return [*([] if residual_TK is None else [s_TK]), n_TK, *ys]


@normed_linears.register_fake
def _(
    x_TK: Tensor,
    residual_TK: Tensor | None,
    gain_K: Tensor,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    _check_norm(x_TK, residual_TK, gain_K, weights, biases)
    rows = [x_TK.new_empty(x_TK.shape) for _ in range(1 if residual_TK is None else 2)]
    return [*rows, *(x_TK.new_empty(x_TK.shape[0], w_NK.shape[0]) for w_NK in weights)]


def norm_refusal(x_TK: Tensor, residual_TK: Tensor | None, gain_K: Tensor) -> str | None:
    """Why `normed_linears` does not norm these, and what to do, or None."""
    if x_TK.shape[0] != 1 or x_TK.shape[1] > MOST_NORMED:
        return f"x_TK is {_shape(x_TK)}, not one row of up to {MOST_NORMED}; use `linears`"
    for what, t, shape in (("residual", residual_TK, x_TK.shape), ("gain", gain_K, x_TK.shape[1:])):
        if t is None:
            continue
        if t.shape != shape or t.stride(-1) != 1:
            return (
                f"the {what} is {_shape(t)} with the strides {t.stride()}, not a contiguous "
                f"{list(shape)}; reshape it"
            )
        if (t.dtype, t.device) != (x_TK.dtype, x_TK.device):
            return (
                f"the {what} is {t.dtype} on {t.device}, x_TK {x_TK.dtype} on {x_TK.device}; "
                "convert one of them"
            )
    return None


def refusal(x_TK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> str | None:
    """Why these are no arguments of `linears`, and what to do, or None."""
    if x_TK.dim() != 2 or not 1 <= x_TK.shape[0] <= MOST_ROWS or x_TK.shape[1] == 0:
        return (
            f"x_TK is {_shape(x_TK)}, not [T, K] with T from 1 to {MOST_ROWS}; use torch's linear"
        )
    if x_TK.dtype not in DTYPES:
        return f"x_TK is {x_TK.dtype}, not bfloat16 or float16; use torch's linear"
    if x_TK.stride(1) != 1:
        return f"x_TK has the strides {x_TK.stride()}; make it contiguous"
    if not weights or len(biases) != len(weights):
        return f"got {len(weights)} weights and {len(biases)} biases; give a bias or None for each"
    for g, (w_NK, b_N) in enumerate(zip(weights, biases, strict=True)):
        if w_NK.dim() != 2 or w_NK.shape[1] != x_TK.shape[1] or w_NK.shape[0] == 0:
            return f"weight {g} is {_shape(w_NK)}, not [N, {x_TK.shape[1]}]; give weights of x_TK"
        if not w_NK.is_contiguous():
            return f"weight {g} has the strides {w_NK.stride()}; make it contiguous"
        if b_N is not None and b_N.shape != w_NK.shape[:1]:
            return f"bias {g} is {_shape(b_N)}, not [{w_NK.shape[0]}]; give a number for each row"
        if b_N is not None and not b_N.is_contiguous():
            return f"bias {g} has the strides {b_N.stride()}; make it contiguous"
        for what, t in (("weight", w_NK), ("bias", b_N)):
            if t is not None and (t.dtype, t.device) != (x_TK.dtype, x_TK.device):
                return (
                    f"{what} {g} is {t.dtype} on {t.device}, x_TK {x_TK.dtype} on {x_TK.device}; "
                    "convert one of them"
                )
    return None


def _check(x_TK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    reason = refusal(x_TK, weights, biases)
    if reason is not None:
        raise ValueError(f"linears: {reason}")


def _check_norm(
    x_TK: Tensor,
    residual_TK: Tensor | None,
    gain_K: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> None:
    reason = refusal(x_TK, weights, biases) or norm_refusal(x_TK, residual_TK, gain_K)
    if reason is not None:
        raise ValueError(f"normed_linears: {reason}")


def _shape(t: Tensor) -> list[int]:
    return list(t.shape)
