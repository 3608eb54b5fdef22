"""Tokens as products with quantised weights read them: in another order of columns, or as codes."""

from __future__ import annotations

from torch import Tensor

from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.operands.group_scales import quantize_tokens
from moe_ops.kernels.triton.experts.operands.permuted import arrange


def tokens_for(x_TD: Tensor, codes: Codes | None) -> tuple[Tensor, Tensor | None]:
    """Tokens, and scales if they have any, as the product with the first weight reads them."""
    if codes is None:
        return x_TD, None
    if codes.in_words:
        return arrange(x_TD, codes.weight), None
    if not codes.quantizes:
        return x_TD, None
    if codes.x_scale_TG is not None:
        return x_TD, codes.x_scale_TG
    return quantize_tokens(x_TD, codes.weight)
