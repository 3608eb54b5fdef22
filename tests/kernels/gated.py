"""The first grouped product alone, for tests."""

from __future__ import annotations

from torch import Tensor

from moe_ops.kernels.triton import Act
from moe_ops.kernels.triton.experts.products.grouped import product
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.kernels.triton.launch import on_its_device


@on_its_device
def grouped_gated(
    x_TD: Tensor,
    rows_R: Tensor,
    ends_E: Tensor,
    w13_EFD: Tensor,
    b13_EF: Tensor | None,
    top_k: int,
    act: Act,
    *,
    tiles: TileMap | None = None,
    wgmma: bool = False,
) -> Tensor:
    """h[r] = activate(W13[e] @ x[rows_R[r] // top_k] + b13[e]) for every row r of expert e."""
    F = w13_EFD.shape[1]
    out = x_TD.new_empty(rows_R.numel(), F // 2 if act.gated else F)
    return product(x_TD, rows_R, ends_E, w13_EFD, b13_EF, out, top_k, act, tiles, wgmma)
