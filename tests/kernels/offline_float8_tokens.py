"""Products of codes of four bits with tokens of float8, compiled by `offline_grouped.py`."""

from __future__ import annotations

import itertools

import torch
import triton.language as tl

from moe_ops.backends.triton_tiles import FLOAT8_TILES, float8_tile
from moe_ops.kernels.triton import LINEAR, Act, Weight
from moe_ops.kernels.triton.experts.products import grouped_float8_tokens
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.ops.activate import Activation
from moe_ops.testing import ACTIVATIONS
from tests.kernels.offline_sizes import FORMATS, PLAIN, D, E, I, empty


def float8_tokens_product(
    N: int, K: int, out_n: int, act: Act, bias: bool, format: tuple[str, int, str],
    tile: tuple[int, int], static: bool = False, grouped: bool = False,
) -> None:  # fmt: skip
    """`static`: whether h has a static scale; `grouped`: whether tokens have a scale for as many
    columns as weights have one."""
    element, across, kind = format
    stored = torch.uint8 if kind == "e8m0" else getattr(torch, kind)
    each, first = K // across if across > 0 else 1, act.kind is not None
    weight, of_tile = Weight(element, 1, across, kind, True, 4), float8_tile(*tile)
    folds = of_tile.fold and grouped_float8_tokens.folds(weight) and not grouped
    how = {"static": empty(1, dtype=torch.float32), "held": tl.bfloat16} if static and first else {}
    grouped_float8_tokens.launch(
        empty(4096, K, dtype=torch.float8_e4m3fn),
        empty(4096, *((K // 32,) if grouped else ()), dtype=torch.float32),
        empty(E, N, K // 8, dtype=torch.int32),
        empty(E, N, each, dtype=stored),
        empty(E, N, each, dtype=torch.uint8) if element == "uint4" else None,
        empty(E, N) if bias else None,
        empty(4096, out_n, dtype=torch.float8_e4m3fn if how else torch.bfloat16),
        TileMap(empty(99, 8, dtype=torch.int32), tile[0]),
        of_tile,
        weight,
        act,
        reference_EN=empty(E, N, dtype=torch.uint8) if folds else None,
        whole=static and not first,
        **how,
    )


def float8_tokens_products(names: list[str]) -> None:
    """Of every activation in int4 with one tile; "plain" stands for the first product of mxfp4 with
    one, and "formats" for both products of these and others with every tile, and static scales."""
    int4, mxfp4 = ("int4", 128, "bfloat16"), ("float4_e2m1", 32, "e8m0")
    few = FLOAT8_TILES[0]
    if PLAIN in names:
        float8_tokens_product(2 * I, D, I, Act("silu"), False, mxfp4, few)
    for name, bias in itertools.product((n for n in names if n in ACTIVATIONS), (False, True)):
        act = Activation(**{"kind": "silu"} | ACTIVATIONS[name])
        rows = 2 * I if act.gated else I
        float8_tokens_product(rows, D, I, Act(*act.args), bias, int4, few)
        if name == "silu":
            float8_tokens_product(D, I, D, LINEAR, bias, int4, few)
    others = [
        (int4, D), (("int4", -1, "float32"), D), (mxfp4, D), (("uint4", 128, "float16"), D),
        (mxfp4, 736),  # a row of 23 scales is not whole words
    ]  # fmt: skip
    for (format, columns), tile in itertools.product(others, FLOAT8_TILES):
        if FORMATS in names:
            float8_tokens_product(2 * I, columns, I, Act("silu"), False, format, tile)
            float8_tokens_product(D, columns, D, LINEAR, True, format, tile)
    for format, tile in ((int4, few), (int4, FLOAT8_TILES[-1]), (mxfp4, few)):
        if FORMATS in names:
            float8_tokens_product(2 * I, D, I, Act("silu"), False, format, tile, grouped=True)
    if FORMATS in names:
        float8_tokens_product(2 * I, D, I, Act("silu"), False, int4, few, static=True)
        float8_tokens_product(D, D, D, LINEAR, False, int4, few, static=True)
