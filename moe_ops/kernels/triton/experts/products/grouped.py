"""The experts for many rows an expert: two grouped products over rows sorted by expert.

T tokens, R sorted (token, expert) pairs, E experts, D model width, I expert width, F rows of the
first projection (2 * I if gated, else I). Expert e owns rows ends_E[e - 1] to ends_E[e] - 1. Rows
at and after ends_E[-1] are read and written by nobody.
"""

from __future__ import annotations

from torch import Tensor

from moe_ops.kernels.triton import LINEAR, Act
from moe_ops.kernels.triton.experts.operands.dequantized_weights import decoded
from moe_ops.kernels.triton.experts.operands.fake_quantized import emulated_hidden, emulated_tokens
from moe_ops.kernels.triton.experts.products import grouped_plain
from moe_ops.kernels.triton.experts.schedule.combine import sum_rows
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap, tile_map
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
    wgmma: tuple[bool, bool] = (False, False),
) -> Tensor:
    """The `experts` op: sort, two products over the same tiles, weighted sum, to which a contiguous
    residual is added if there is one. Codes are decoded first.

    wgmma: which of the products the kernel for Hopper runs; the plain one runs the others.
    """
    x_TD, codes = emulated_tokens(x_TD, layer.codes), layer.codes
    if codes is not None:
        layer = decoded(layer, x_TD.dtype)
    (T, K), (E, _, I) = ids_TK.shape, layer.sizes
    w13, w2 = layer.w13_EFD, layer.w2_EDI
    if layer.transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    rows_R, inverse_R, ends_E = sort_pairs(ids_TK, E, expert_map)
    # Both products mostly take the same tiles; one that does not maps its own.
    tiles = tile_map(ends_E, T * K, tile_rows(x_TD, T * K, w13, wgmma[0]))
    h_RI = grouped_gated(
        x_TD, rows_R, ends_E, w13, layer.b13_EF, K, layer.act, tiles=tiles, wgmma=wgmma[0]
    )  # fmt: skip
    h_RI = emulated_hidden(h_RI, I, codes, ends_E)
    y_RD = grouped_rows(h_RI, ends_E, w2, layer.b2_ED, tiles=tiles, wgmma=wgmma[1])
    return sum_rows(y_RD, inverse_R, weights_TK, K, residual_TD)


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
    """h[r] = activate(W13[e] @ x[rows_R[r] // top_k] + b13[e]) for every row r of expert e.

    W13 is [gate; up], or even and odd rows if interleaved; any strides do.
    """
    F = w13_EFD.shape[1]
    out = x_TD.new_empty(rows_R.numel(), F // 2 if act.gated else F)
    return _product(x_TD, rows_R, ends_E, w13_EFD, b13_EF, out, top_k, act, tiles, wgmma)


@on_its_device
def grouped_rows(
    h_RI: Tensor,
    ends_E: Tensor,
    w2_EDI: Tensor,
    b2_ED: Tensor | None,
    *,
    tiles: TileMap | None = None,
    wgmma: bool = False,
) -> Tensor:
    """y[r] = W2[e] @ h[r] + b2[e] for every row r of expert e; W2 may have any strides."""
    out = h_RI.new_empty(h_RI.shape[0], w2_EDI.shape[1])
    return _product(h_RI, None, ends_E, w2_EDI, b2_ED, out, None, LINEAR, tiles, wgmma)


def tile_rows(a: Tensor, rows: int, w: Tensor, wgmma: bool) -> int:
    """The rows of a tile that a product of these operands takes, for `tile_map`."""
    if wgmma:
        from moe_ops.kernels.triton.experts.products import grouped_wgmma

        return grouped_wgmma.BLOCK_M
    return grouped_plain.config_of(a, rows, w).block_m


def _product(
    a: Tensor,
    rows: Tensor | None,
    ends_E: Tensor,
    w_ENK: Tensor,
    bias_EN: Tensor | None,
    out: Tensor,
    top_k: int | None,
    act: Act,
    tiles: TileMap | None,
    wgmma: bool,
) -> Tensor:
    if out.numel() == 0:
        return out
    block_m = tile_rows(a, out.shape[0], w_ENK, wgmma)
    if tiles is None or tiles.block_m != block_m:
        tiles = tile_map(ends_E, out.shape[0], block_m)
    bias_EN = None if bias_EN is None else bias_EN.contiguous()
    if wgmma:
        from moe_ops.kernels.triton.experts.products import grouped_wgmma

        grouped_wgmma.launch(a, rows, w_ENK, bias_EN, out, tiles, top_k, act)
    else:
        grouped_plain.launch(a, rows, w_ENK, bias_EN, out, tiles, top_k, act)
    return out
