"""Expert products in operators that every runtime has: one product an expert, so that nothing holds
a weight for each row.

An expert's product is computed for all rows and kept for its own. That is E / K times the work of a
grouped product, which no common set of operators has. Where there are few rows, and that is known,
each row's weight is gathered instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.checks.shapes import DTYPES
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall
from moe_ops.exporting.codes import as_indexed, cannot, decode, require_makeable
from moe_ops.exporting.rows import experts_of_rows
from moe_ops.ops.activate import ActivateCall, activate
from moe_ops.ops.dispatch import local_ids
from moe_ops.ops.expert_gemm import ExpertGemmCall, of_rows
from moe_ops.ops.experts import ExpertsCall, restored
from moe_ops.ops.experts_products import rows13_factor
from moe_ops.ops.quantize import quantize
from moe_ops.quant.formats import TENSOR, Format

MOST_GATHERED = 64  # rows, each with a weight of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A stacked weight [E, F, D], or its codes, with what belongs to it."""

    w: Tensor
    scale: Tensor | None
    zero: Tensor | None
    format: str
    factor: Tensor | None  # [E, 1] or [E, F]
    bias: Tensor | None
    transposed: bool

    def of(self, index: int | Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The weight [F, D], the factor and the bias of an expert in float32; of several experts
        stacked."""
        w = as_indexed(self.w)[index]
        w = w.transpose(-1, -2) if self.transposed else w
        scale = None if self.scale is None else as_indexed(self.scale)[index]
        zero = None if self.zero is None else self.zero[index]
        factor = None if self.factor is None else self.factor[index]
        bias = None if self.bias is None else self.bias[index].float()
        return decode(w, scale, zero, self.format), factor, bias

    def times(self, x: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
        """Float32 rows times the weight of one expert, rounded once."""
        w_FD, factor, bias = self.of(expert)
        return _finished(x @ w_FD.t(), factor, bias, dtype)

    def times_each(self, x_RD: Tensor, expert_R: Tensor, dtype: torch.dtype) -> Tensor:
        """Float32 rows, each times the weight of its own expert, rounded once."""
        w_RFD, factor, bias = self.of(expert_R)
        y_RF = torch.bmm(w_RFD, x_RD[:, :, None])[:, :, 0]
        return _finished(y_RF, factor, bias, dtype)


def _finished(y: Tensor, factor: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = y if factor is None else y * factor
    return (y if bias is None else y + bias).to(dtype)


def is_few(R: int | torch.SymInt, E: int) -> bool:
    """Whether rows, whose number is known, are few enough for each to have a weight of its own."""
    return isinstance(R, int) and min(MOST_GATHERED, E) >= R


def quantized_linears(call: QuantizedLinearsCall) -> list[Tensor]:
    """`quantized_linears` by a product for each weight."""
    x_TK, outs = call.x_TK.float(), []
    for g, w_NK in enumerate(call.weights):
        bias = call.biases[g]
        values_NK = decode(w_NK, call.scales[g], call.zeros[g], call.w_format)
        y_TN = _finished(
            x_TK @ values_NK.t(), call.global_scales[g], None if bias is None else bias.float(),
            call.x_TK.dtype,
        )  # fmt: skip
        outs.append(y_TN)
    return outs


def expert_gemm(call: ExpertGemmCall) -> Tensor:
    """`expert_gemm` by a product of all rows for each expert, of which its own rows are kept."""
    dtype = DTYPES[call.out_dtype] if call.out_dtype else call.x_RD.dtype
    R, E = call.x_RD.shape[0], call.w_EFD.shape[0]
    x_RD = decode(call.x_RD, call.x_scale_RG, None, call.x_format)
    if call.x_global_scale_R is not None:
        x_RD = x_RD * call.x_global_scale_R[:, None]
    factor = None if call.global_scale_E is None else of_rows(call.global_scale_E)
    weight = Weight(
        w=call.w_EFD, scale=call.w_scale_EFG, zero=call.w_zero_EFG, format=call.w_format,
        factor=factor, bias=call.bias_EF, transposed=call.transposed,
    )  # fmt: skip
    expert_R = experts_of_rows(call.ends_E, R)
    if is_few(R, E):
        return weight.times_each(x_RD, expert_R.clamp(max=E - 1), dtype)
    y_RF = weight.times(x_RD, 0, dtype)  # also of rows of no expert, which may hold anything
    for e in range(1, E):
        y_RF = torch.where((expert_R == e)[:, None], weight.times(x_RD, e, dtype), y_RF)
    return y_RF


def experts(call: ExpertsCall) -> Tensor:
    """`experts` by a pass of all tokens through each expert, of which a token's own are summed.

    Tokens and activations that are quantised are rounded to their codes and decoded again, as the
    definition's products decode them.
    """
    c = restored(call) if call.layout else call
    _require_by_rows(c)
    first, second = _weights(c)
    (T, K), E, dtype = c.ids_TK.shape, c.w13_EFD.shape[0], c.dtype
    ids_TK = local_ids(c.ids_TK, E, c.expert_map).view(T, K)  # E: not here
    if c.x_scale_TG is not None:
        x_TD = decode(c.x_TD, c.x_scale_TG, None, c.x_format)
    else:
        x_TD = _rounded(c.x_TD, c.x_format, c.x_scale)
    D, weights_TK = x_TD.shape[1], c.weights_TK.float()

    def hidden(y_RF: Tensor) -> Tensor:
        h_RI = activate.body(ActivateCall(y_RF, *c.activation))
        return _rounded(h_RI, c.x_format, c.h_scale)

    if is_few(T * K, E):
        expert_R = ids_TK.reshape(-1)
        at_R = expert_R.clamp(max=E - 1)
        x_RD = x_TD[:, None].expand(T, K, D).reshape(T * K, D)
        y_RD = second.times_each(hidden(first.times_each(x_RD, at_R, dtype)), at_R, dtype)
        products_RD = y_RD.float() * weights_TK.reshape(-1)[:, None]
        products_RD = torch.where((expert_R < E)[:, None], products_RD, 0.0)
        return products_RD.view(T, K, D).sum(1).to(dtype)
    out_TD = torch.zeros_like(x_TD)
    for e in range(E):
        is_e_TK = ids_TK == e
        weight_T = torch.where(is_e_TK, weights_TK, 0.0).sum(1)
        y_TD = second.times(hidden(first.times(x_TD, e, dtype)), e, dtype)
        # Of other tokens an expert may give infinities, which a product with zero would keep.
        here_T1 = is_e_TK.any(1)[:, None]
        out_TD = out_TD + torch.where(here_T1, y_TD.float() * weight_T[:, None], 0.0)
    return out_TD.to(dtype)


def _require_by_rows(c: ExpertsCall) -> None:
    """Raise NotImplementedError unless what inputs are rounded to depends on their row alone."""
    if not c.x_format:
        return
    require_makeable("experts", "x_format", c.x_format)
    for name, scale in (("x_scale", c.x_scale), ("h_scale", c.h_scale)):
        if scale is not None and scale.numel() > 1:
            why = "has a scale for each expert, which rows are found by"
            raise cannot("experts", name, tuple(scale.shape), why, "aten")
    if Format.of(c.x_format).group == TENSOR and c.h_scale is None:
        why = "makes one scale of the rows of all experts"
        raise cannot("experts", "x_format", c.x_format, why, "aten", "give a static h_scale")


def _rounded(x: Tensor, format: str, scale: Tensor | None) -> Tensor:
    """Rows in float32, rounded to a format if there is one."""
    if not format:
        return x.float()
    q, scale_RG = quantize(x, format, scale)
    return decode(q, scale_RG, None, format)


def _weights(c: ExpertsCall) -> tuple[Weight, Weight]:
    """The weights of both products."""
    factors = rows13_factor(c), c.global_scale2_E
    factor13, factor2 = (None if f is None else of_rows(f) for f in factors)
    first = Weight(
        w=c.w13_EFD, scale=c.w13_scale_EFG, zero=c.w13_zero_EFG, format=c.w_format,
        factor=factor13, bias=c.b13_EF, transposed=c.transposed,
    )  # fmt: skip
    second = Weight(
        w=c.w2_EDI, scale=c.w2_scale_EDG, zero=c.w2_zero_EDG, format=c.w_format,
        factor=factor2, bias=c.b2_ED, transposed=c.transposed,
    )  # fmt: skip
    return first, second
