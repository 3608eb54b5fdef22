"""Sum each token's expert outputs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

BD = 1024


@triton.jit
def onto(out, residual):
    """A result that is rounded already, added to a residual and rounded again."""
    return (out.to(tl.float32) + residual.to(tl.float32)).to(out.dtype)


@triton.jit
def sum_kernel(
    y_ptr, inverse_ptr, weights_ptr, residual_ptr, out_ptr,
    K: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of weight[t, k] * y[row of (t, k)], in the order of k, rounded; plus
    residual[t] if there is one, rounded again. ORDERED: each product is added with one rounding."""
    take_turn(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    if ORDERED:
        sum_D = tl.zeros((BD,), tl.float32)
        for k in tl.static_range(K):
            pair_D = t * K + k + 0 * d  # as vectors, which masks are
            row_D = tl.load(inverse_ptr + pair_D)
            mask_D = (d < D) & (row_D >= 0)
            y_D = tl.load(y_ptr + row_D.to(tl.int64) * D + d, mask=mask_D, other=0.0)
            weight_D = tl.load(weights_ptr + pair_D, mask=row_D >= 0, other=0.0)
            sum_D = tl.fma(y_D.to(tl.float32), weight_D.to(tl.float32), sum_D)
    else:
        k = tl.arange(0, BK)
        row_K = tl.load(inverse_ptr + t * K + k, mask=k < K, other=-1)
        mask_KD = (row_K >= 0)[:, None] & (d < D)[None, :]
        at_KD = row_K.to(tl.int64)[:, None] * D + d[None, :]
        y_KD = tl.load(y_ptr + at_KD, mask=mask_KD, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            weight_K = tl.load(weights_ptr + t * K + k, mask=row_K >= 0, other=0.0).to(tl.float32)
            y_KD = y_KD * weight_K[:, None]
        sum_D = tl.sum(y_KD, 0)
    out_D = sum_D.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual_D = tl.load(residual_ptr + t * D + d, mask=d < D, other=0.0)
        out_D = onto(out_D, residual_D)
    tl.store(out_ptr + t * D + d, out_D, mask=d < D)


def sum_rows(
    y_RD: Tensor, inverse_R: Tensor, weights_TK: Tensor | None, top_k: int,
    residual_TD: Tensor | None = None, ordered: bool = False,
) -> Tensor:  # fmt: skip
    """out_TD from the rows of experts, with weights unless the rows contain them. `ordered`: with
    weights, each added with one rounding."""
    T, D = inverse_R.shape[0] // top_k, y_RD.shape[1]
    out_TD = y_RD.new_empty(T, D)
    launch(
        sum_kernel, (T, triton.cdiv(D, BD)), y_RD, inverse_R, weights_TK, residual_TD, out_TD,
        K=top_k, D=D, BK=triton.next_power_of_2(top_k), BD=min(BD, triton.next_power_of_2(D)),
        ORDERED=ordered, num_warps=4, **pdl_options(y_RD),
    )  # fmt: skip
    return out_TD
