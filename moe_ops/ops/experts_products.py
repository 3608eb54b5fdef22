"""The two products in the definition of the experts, on inputs and weights of every format.

A call is the record of `experts`, whose file imports this one.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import Tensor

from moe_ops.ops.dispatch import dispatch
from moe_ops.ops.expert_gemm import expert_gemm, row_experts
from moe_ops.ops.quantize import quantize, quantize_rows
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.quant.packing import global_scale_of


def first_product(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x_RD, y_RF, rows_R, ends_E): the rows of tokens as they were multiplied, codes with an
    x_format; their products before the activation; and their order, as `dispatch` gives it."""
    c, x_TD, E, x_format = call, call.x_TD, call.w13_EFD.shape[0], call.x_format
    x_scale_RG = own_x_R = None
    if x_format and not _by_expert(c.x_scale):
        # Before dispatch there are fewer rows, and none that is unspecified.
        own_x_T = _own_global_scales(x_TD, c.x_scale, x_format)
        q_TD, scale_TG = x_TD, c.x_scale_TG
        if scale_TG is None:
            q_TD, scale_TG = quantize(x_TD, x_format, c.x_scale if own_x_T is None else own_x_T)
        x_RD, rows_R, ends_E = dispatch(q_TD, c.ids_TK, E, c.expert_map)
        token_R = rows_R.clamp(min=0).long() // c.ids_TK.shape[1]
        # One scale for the tensor stays one.
        x_scale_RG = scale_TG if Format.of(x_format).group == TENSOR else scale_TG[token_R]
        own_x_R = None if own_x_T is None else own_x_T[token_R]
    else:
        x_RD, rows_R, ends_E = dispatch(x_TD, c.ids_TK, E, c.expert_map)
    if _by_expert(c.x_scale):
        scale_R = c.x_scale[row_experts(ends_E, x_RD.shape[0])]
        x_RD, x_scale_RG, x_format = quantize_rows(x_RD, x_format, scale_R)
    y_RF = expert_gemm(
        x_RD, c.w13_EFD, ends_E, c.b13_EF, c.transposed, x_scale_RG=x_scale_RG,
        w_scale_EFG=c.w13_scale_EFG, w_zero_EFG=c.w13_zero_EFG, global_scale_E=rows13_factor(c),
        x_format=x_format, w_format=c.w_format, out_dtype=_out_dtype(c), x_global_scale_R=own_x_R,
    )  # fmt: skip
    return x_RD, y_RF, rows_R, ends_E


def second_product(call: Any, h_RI: Tensor, rows_R: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of the result before they are weighed and summed, of the rows of activations."""
    c, h_format = call, call.x_format
    h_scale_RG = own_h_R = None
    if _by_expert(c.h_scale):
        scale_R = c.h_scale[row_experts(ends_E, h_RI.shape[0])]
        h_RI, h_scale_RG, h_format = quantize_rows(h_RI, h_format, scale_R)
    elif h_format:
        # One scale for all rows must not see what unused rows hold.
        h_RI = h_RI.masked_fill(rows_R[:, None] < 0, 0)
        own_h_R = _own_global_scales(h_RI, c.h_scale, h_format)
        h_RI, h_scale_RG = quantize(h_RI, h_format, c.h_scale if own_h_R is None else own_h_R)
    return expert_gemm(
        h_RI, c.w2_EDI, ends_E, c.b2_ED, c.transposed, x_scale_RG=h_scale_RG,
        w_scale_EFG=c.w2_scale_EDG, w_zero_EFG=c.w2_zero_EDG, global_scale_E=c.global_scale2_E,
        x_format=h_format, w_format=c.w_format, out_dtype=_out_dtype(c), x_global_scale_R=own_h_R,
    )  # fmt: skip


def _out_dtype(call: Any) -> str:
    return str(call.dtype).removeprefix("torch.") if call.x_format else ""


def _by_expert(scale: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a static scale of an input is one for each of several experts."""
    return scale is not None and scale.numel() > 1


def _own_global_scales(x_RD: Tensor, static: Tensor | None, format: str) -> Tensor | None:
    """The global scales of rows, where the format has them and none is static."""
    found = Format.of(format)
    if static is not None or not found.has_global_scale:
        return None
    return global_scale_of(x_RD, found, by_row=True)


def rows13_factor(call: Any) -> Tensor | None:
    """The global scale of w13 as `expert_gemm` takes it: two factors become those of all rows."""
    scale_E, width = call.global_scale13_E, call.w13_EFD.shape[1] // 2
    if scale_E is None or scale_E.dim() == 1:
        return scale_E
    return scale_E.repeat(1, width) if call.interleaved else scale_E.repeat_interleave(width, 1)
