"""The experts for many rows an expert of weights and inputs of 8 bits that have a scale a row or
tensor, on Hopper (sm_90): `grouped_wgmma.py` launched on codes.

Tokens are quantised once, unless they come as codes, and written to each of their rows, in the
order of experts. The first product stores codes if h has static scales; else h, which is quantised
by one more launch, as `row_scales.py` says.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops.kernels.triton import LINEAR, Act
from moe_ops.kernels.triton.experts.call import Call, Operand, Reads
from moe_ops.kernels.triton.experts.driver import Products
from moe_ops.kernels.triton.experts.products import grouped_wgmma
from moe_ops.kernels.triton.experts.products.grouped_wgmma import BLOCK_M, Scales
from moe_ops.kernels.triton.experts.weights import Stack


def _up(c: Call) -> None:
    made = {"out": c.static, "dtype": c.dtype}
    _product(c, c.x, "row", c.layer.stack13, c.h.values, c.layer.act, **made)


def _down(c: Call) -> None:
    each = "row" if c.static is None else grouped_wgmma.each(c.static)
    _product(c, c.h, each, c.layer.stack2, c.out, LINEAR)


def _product(
    c: Call, a: Operand, each: str, stack: Stack, to: Tensor, act: Act, **made: Any
) -> None:
    w, w_scale, *_, bias = stack
    assert a.scale is not None and w_scale is not None and c.layer.weight is not None
    scales = Scales(a=a.scale, a_each=each, w=w_scale, weight=c.layer.weight, **made)
    bias = None if bias is None else bias.contiguous()
    grouped_wgmma.launch(a.values, None, w, bias, to, c.tile_map, None, act, scales)


run = Products(
    up=_up, down=_down, reads=Reads(gathered=True, stores="static"), tile_rows=lambda *_: BLOCK_M
).run
