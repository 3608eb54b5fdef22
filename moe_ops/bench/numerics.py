"""Whether a result is right: against float32, on memory that nobody wrote filled with NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.bench.formats import eight_bit
from moe_ops.bench.inputs import Routed, Weights
from moe_ops.quant.config import QuantConfig

# |got - want| / |want| of a whole layer, at most. In 16 bits the activation, both products and the
# sum are rounded; bfloat16's measure 0.4 %.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}
# With inputs in 8 bits, of many tokens. A value of float8_e4m3fn has 3 bits of mantissa, so that
# rounding costs 2.6 %; that of the tokens meets both gate and up, and the activations are rounded
# once more: the definition measures 4.4 %, as the peers in benchmarks/peers/ do, int8 2 %.
LIMIT_8_BIT = 4.6e-2
# By one scale for a row or all values, a tenth more than the definition's error, which grows with
# the width; this is what it measures for normal numbers in layers of 4096 by 14336.
LIMITS_8_BIT = {
    "float8_e4m3fn:row": 1.1 * 4.64e-2, "float8_e4m3fn:tensor": 1.1 * 4.64e-2,
    "int8:row": 1.1 * 3.18e-2, "int8:tensor": 1.1 * 4.81e-2,
}  # fmt: skip
# More of few tokens, whose largest activations decide: the definition's error of a single one is
# 3.3 to 5.3 % in layers of published widths. Over the square root of their number.
MORE_8_BIT = 1.5e-2
OF_A_ROW = 5  # times the limit for any one token, which has fewer numbers to average over


def limit_of(dtype: torch.dtype, quant: QuantConfig | None, tokens: int) -> float:
    """The largest relative error that is right, of inputs in 16 or 32 bits or in 8."""
    if quant is None or not eight_bit(quant):
        return LIMITS[dtype]
    return LIMITS_8_BIT.get(quant.inputs, LIMIT_8_BIT) + MORE_8_BIT * tokens**-0.5


def want(weights: Weights, routed: Routed) -> Tensor:
    """The layer in float32 on tokens that are not quantised, an expert at a time, so that one
    expert's weights are converted or decoded.
    """
    out_TD = torch.zeros(routed.x_TD.shape, device=routed.x_TD.device)
    with exact_float32():
        for e in routed.ids_TK.unique().tolist():
            rows, choices = (routed.ids_TK == e).nonzero(as_tuple=True)
            w13_FD, w2_DI = weights.expert(e)
            gate, up = F.linear(routed.x_TD[rows].float(), w13_FD).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, w2_DI)
            # A token chooses an expert once, so no row is met twice.
            out_TD[rows] += y * routed.weights_TK[rows, choices, None]
    return out_TD


def want_products(x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """`expert_gemm` in float32, an expert at a time: its reference gathers a weight for a row."""
    y_RF = torch.zeros(x_RD.shape[0], w_EFD.shape[1], device=x_RD.device)
    start = 0
    with exact_float32():
        for e, end in enumerate(ends_E.tolist()):
            if end > start:
                y_RF[start:end] = F.linear(x_RD[start:end].float(), w_EFD[e].float())
            start = end
    return y_RF


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """The relative error of every row; of one smaller than most, relative to most."""
    sizes = want.double().norm(dim=-1)
    return (got.double() - want.double()).norm(dim=-1) / sizes.clamp(
        min=sizes.square().mean().sqrt()
    )


def check(
    got: Tensor, want: Tensor, dtype: torch.dtype, what: str, limit: float | None = None
) -> float:
    """The relative error. Raises AssertionError if it or a row's is too large, or for NaN. The
    limit is that of the dtype if none is given.
    """
    if got.shape != want.shape or got.dtype != dtype:
        raise AssertionError(
            f"{what}: {got.dtype} {tuple(got.shape)}, wanted {dtype} {tuple(want.shape)}"
        )
    limit = LIMITS[dtype] if limit is None else limit
    error = relative_error(got, want)
    if not error <= limit:
        nan = int(got.isnan().sum())
        raise AssertionError(
            f"{what}: relative error {error:.3g}, at most {limit:.3g} is right"
            + (f"; {nan} of {got.numel()} are NaN" if nan else "")
        )
    rows = row_errors(got, want)
    if not (rows <= OF_A_ROW * limit).all():
        raise AssertionError(
            f"{what}: relative error {float(rows.max()):.3g} of row {int(rows.argmax())}, at most "
            f"{OF_A_ROW * limit:.3g} is right"
        )
    return error


@contextmanager
def exact_float32() -> Iterator[None]:
    """Products of float32 in float32, not in tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
