"""Rounding in a forward that a backward passes straight through: quantisation-aware training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.quant import packing
from moe_ops.quant.arguments import named_format


class _StraightThrough(torch.autograd.Function):
    """What codes stand for, of which the gradient is that of what was coded."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, format: str) -> Tensor:
        found = named_format("format", format)
        done = packing.quantize(x, found)
        return packing.dequantize(done.values, done.scale, found, done.zero).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def fake_quantize(x: Tensor, format: str) -> Tensor:
    """Round x to the values of a format, and pass gradients on as if nothing had been rounded.

        y = moe_ops.experts(moe_ops.fake_quantize(x_TD, "float8_e4m3fn:1x128"), weights_TK, ids_TK,
                            moe_ops.fake_quantize(w13_EFD, "mxfp4"), ...)

    The values are those that `quantize` of x stands for, each group with a scale of its own, in
    x's dtype: a model that trains on them is trained for inference in the format. Codes are no
    floats, so `quantize` itself has no gradient (the straight-through estimator is that of
    arXiv:1308.3432).

    x: float [..., rows, columns]; format: as `quantize` takes it. Raises ValueError or TypeError
    for an unknown format, wrong dtypes and columns that the format does not fill.
    """
    found: Tensor = _StraightThrough.apply(x, format)
    return found
