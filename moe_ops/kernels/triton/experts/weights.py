"""The two stacked weights of a layer as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Act, Weight
from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.experts.formats.codes import Codes, are_words

# A weight with all that belongs to it, in the order of the kernels' arguments.
Stack = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The weights of a layer, their biases, and the activation between them. Weights of codes are
    as `as_stored` gives them."""

    w13_EFD: Tensor
    w2_EDI: Tensor
    b13_EF: Tensor | None
    b2_ED: Tensor | None
    transposed: bool
    act: Act
    codes: Codes | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(E, D, I)."""
        E, D, I = self._by_row(self.w2_EDI).shape
        return E, D, I if self.codes is None else self.codes.weight.columns(I)

    @property
    def weight(self) -> Weight | None:
        """The format of both weights, as the kernels take it; None for floats."""
        return None if self.codes is None else self.codes.weight

    @property
    def stack13(self) -> Stack:
        """w13 [E, rows, columns], its scales, zero points and global scales, and its bias."""
        c = self.codes
        factors = (
            (None,) * 3 if c is None else (c.w13_scale_EFG, c.w13_zero_EFG, c.global_scale13_E)
        )
        return (self._by_row(self.w13_EFD), *factors, self.b13_EF)

    @property
    def stack2(self) -> Stack:
        c = self.codes
        factors = (None,) * 3 if c is None else (c.w2_scale_EDG, c.w2_zero_EDG, c.global_scale2_E)
        return (self._by_row(self.w2_EDI), *factors, self.b2_ED)

    @property
    def shared13(self) -> str:
        """How rows of w13 share its global scales: empty, where an expert has one; "halves" or
        "pairs" where gate and up have one each, by where their rows are."""
        global_scale13_E = None if self.codes is None else self.codes.global_scale13_E
        if global_scale13_E is None or global_scale13_E.dim() == 1:
            return ""
        return "pairs" if self.act.interleaved else "halves"

    def _by_row(self, w: Tensor) -> Tensor:
        return w.transpose(1, 2) if self.transposed else w


def strides(stack: Stack) -> tuple[int, ...]:
    """The strides of a weight over an expert, a row and a column; of its bias over an expert."""
    w, *_, bias = stack
    return *w.stride(), 0 if bias is None else bias.stride(0)


@triton.jit
def rows_at(
    w_ptr, e, row_M, stride_e, stride_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """[M, 1]: where rows of an expert's weight begin; e is an expert, or one for each row.

    Words are contiguous, so their strides are known when this is compiled. As arguments that 16
    does not divide they would keep words from being loaded side by side.
    """
    if are_words(W):
        stride_row = COLUMNS * W.bits // 32
        stride_e = ROWS * (COLUMNS * W.bits // 32)
    return (w_ptr + e.to(tl.int64) * stride_e + row_M.to(tl.int64) * stride_row)[:, None]


@triton.jit
def up_rows(block, I: tl.constexpr, BI: tl.constexpr, ACT: tl.constexpr):
    """(rows, inside): the rows of w13 behind BI columns of h. Gate and up alternate where they do
    in the weight, so that neighbours stay neighbours; else the gates come first.
    """
    GATED: tl.constexpr = ACT.gated
    BF: tl.constexpr = 2 * BI if GATED else BI
    f = tl.arange(0, BF)
    if GATED and ACT.interleaved:
        column_F = block * BI + f // 2
        row_F = block * BF + f
    else:
        column_F = block * BI + f % BI
        row_F = column_F + f // BI * I
    return row_F, column_F < I


@triton.jit
def activated(
    acc_FN, bias_ptr, bias_offset, row_F, inside_F, BI: tl.constexpr, BN: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    """h [BI, BN] of the first product's tile, whose rows are as `up_rows` orders them."""
    if bias_ptr is not None:
        bias_F = tl.load(bias_ptr + bias_offset + row_F, mask=inside_F, other=0.0)
        acc_FN += bias_F.to(tl.float32)[:, None]
    if ACT.gated:
        if ACT.interleaved:
            pairs = tl.permute(tl.reshape(acc_FN, (BI, 2, BN)), (0, 2, 1))
        else:
            pairs = tl.permute(tl.reshape(acc_FN, (2, BI, BN)), (1, 2, 0))
        gate_IN, up_IN = tl.split(pairs)
        h_IN = activate_gated(gate_IN, up_IN, ACT)
    else:
        h_IN = activate(acc_FN, ACT)
    return h_IN
