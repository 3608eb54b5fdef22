"""The experts for many rows an expert: two grouped products over rows sorted by expert.

T tokens, R sorted (token, expert) pairs, E experts, D model width, I expert width, F rows of the
first projection (2 * I if gated, else I). Expert e owns rows ends_E[e - 1] to ends_E[e] - 1. Rows
at and after ends_E[-1] are read and written by nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_ops.kernels.triton import LINEAR, Act
from moe_ops.kernels.triton.experts.adapters import NOTHING, Added
from moe_ops.kernels.triton.experts.call import Call, Reads
from moe_ops.kernels.triton.experts.driver import Products
from moe_ops.kernels.triton.experts.products import grouped_plain
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap, tile_map
from moe_ops.kernels.triton.launch import on_its_device


def run(*call: Any, wgmma: tuple[bool, bool] = (False, False), **options: Any) -> Tensor:
    """The `experts` op, as `run` of `driver.py`; codes are decoded first.

    wgmma: which of the products the kernel for Hopper runs; the plain one runs the others.
    """
    return _run(*wgmma)(*call, **options)


@functools.cache
def _run(up: bool, down: bool) -> Callable[..., Tensor]:
    return Products(
        up=functools.partial(_up, up), down=functools.partial(_down, down), reads=Reads(),
        # Both products mostly take the same tiles; one that does not maps its own.
        tile_rows=lambda c, x_TD: tile_rows(x_TD, c.ids_TK.numel(), c.layer.stack13[0], up),
        decodes=True,
    ).run  # fmt: skip


def _up(wgmma: bool, c: Call) -> None:
    (w, *_, bias), (rows_R, ends_E), act = c.layer.stack13, c.order, c.layer.act
    to, choices = c.h.values, None if rows_R is None else c.x.choices
    args = c.x.values, rows_R, ends_E, w, bias, to, choices, act, c.tile_map, wgmma
    product(*args, added=c.added13, slots=c.slots)


def _down(wgmma: bool, c: Call) -> None:
    (w, *_, bias), (_, ends_E) = c.layer.stack2, c.order
    args = c.h.values, None, ends_E, w, bias, c.out, None, LINEAR, c.tile_map, wgmma
    product(*args, added=c.added2, slots=c.slots)


@on_its_device
def grouped_rows(
    h_RI: Tensor, ends_E: Tensor, w2_EDI: Tensor, b2_ED: Tensor | None, *,
    tiles: TileMap | None = None, wgmma: bool = False,
) -> Tensor:  # fmt: skip
    """y[r] = W2[e] @ h[r] + b2[e] for every row r of expert e; W2 may have any strides."""
    out = h_RI.new_empty(h_RI.shape[0], w2_EDI.shape[1])
    return product(h_RI, None, ends_E, w2_EDI, b2_ED, out, None, LINEAR, tiles, wgmma)


def tile_rows(a: Tensor, rows: int, w: Tensor, wgmma: bool, added: Added = NOTHING) -> Any:
    """The rows of a tile that a product of these operands takes, for `tile_map`."""
    return _kernel(True).BLOCK_M if wgmma else grouped_plain.config_of(a, rows, w, added).block_m


def _kernel(wgmma: bool) -> Any:
    if not wgmma:
        return grouped_plain
    from moe_ops.kernels.triton.experts.products import grouped_wgmma

    return grouped_wgmma


def product(
    a: Tensor, rows: Tensor | None, ends_E: Tensor, w_ENK: Tensor, bias_EN: Tensor | None,
    out: Tensor, top_k: int | None, act: Act, tiles: TileMap | None, wgmma: bool,
    added: Added = NOTHING, slots: int | None = None,
) -> Tensor:  # fmt: skip
    """`out`, where row r of expert e becomes activate(W[e] @ a[s] + bias[e]), where s is r, or
    rows[r] // top_k. W is [gate; up], or even and odd rows if interleaved; any strides do.
    What `added` adds is added before the activation. ends_E and slots as `tile_map` takes them."""
    if out.numel() == 0:
        return out
    wgmma = wgmma and _kernel(True).adds(added)
    block_m = tile_rows(a, out.shape[0], w_ENK, wgmma, added)
    if tiles is None or tiles.block_m != block_m:
        tiles = tile_map(ends_E, out.shape[0], block_m, slots)
    bias_EN = None if bias_EN is None else bias_EN.contiguous()
    _kernel(wgmma).launch(a, rows, w_ENK, bias_EN, out, tiles, top_k, act, added=added)
    return out
