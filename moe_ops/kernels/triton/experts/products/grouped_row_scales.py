"""The experts for many rows an expert of weights and inputs of 8 bits that have a scale a row or
tensor, on Hopper (sm_90): `grouped_wgmma.py` launched on codes.

Tokens are quantised once, unless they come as codes, and written to each of their rows, in the
order of experts. The first product stores codes if h has static scales; else h, which is quantised
by one more launch, as `row_scales.py` says.
"""

from __future__ import annotations

from torch import Tensor

from moe_ops.kernels.triton import LINEAR
from moe_ops.kernels.triton.experts.formats.codes import floats_of
from moe_ops.kernels.triton.experts.operands.row_scales import quantize_h, quantize_x
from moe_ops.kernels.triton.experts.products import grouped_wgmma
from moe_ops.kernels.triton.experts.products.grouped_wgmma import BLOCK_M, Scales
from moe_ops.kernels.triton.experts.schedule.combine import sum_rows
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.kernels.triton.experts.schedule.tile_map import tile_map
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.kernels.triton.launch import on_its_device


@on_its_device
def run(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    layer: Experts,
    expert_map: Tensor | None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """The `experts` op, added to a contiguous residual if there is one."""
    (T, K), (E, D, I), codes = ids_TK.shape, layer.sizes, layer.codes
    assert codes is not None
    R, static, weight, dtype = T * K, codes.h_scale, codes.weight, floats_of(x_TD, codes)
    _, inverse_R, ends_E = sort_pairs(ids_TK, E, expert_map)
    tiles = tile_map(ends_E, R, BLOCK_M)
    x_RD, scale_R = quantize_x(x_TD, codes, ids_TK, expert_map, inverse_R)
    h_RI = x_TD.new_empty(R, I, dtype=dtype if static is None else codes.dtype)
    b13, b2 = (None if b is None else b.contiguous() for b in (layer.b13_EF, layer.b2_ED))
    scales = Scales(
        a=scale_R, a_each="row", w=codes.scale13_EFG, weight=weight, out=static, dtype=dtype
    )
    grouped_wgmma.launch(x_RD, None, layer.w13_EFD, b13, h_RI, tiles, None, layer.act, scales)
    if static is None:
        h_RI, scale_R = quantize_h(h_RI, codes, ends_E)
        scales = Scales(a=scale_R, a_each="row", w=codes.scale2_EDG, weight=weight)
    else:
        each = grouped_wgmma.each(static)
        scales = Scales(a=static, a_each=each, w=codes.scale2_EDG, weight=weight)
    y_RD = x_TD.new_empty(R, D, dtype=dtype)
    grouped_wgmma.launch(h_RI, None, layer.w2_EDI, b2, y_RD, tiles, None, LINEAR, scales)
    return sum_rows(y_RD, inverse_R, weights_TK, K, residual_TD)
