"""Tiles of float4 that the tables give, against the times of all that were tried on an H200."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_streams import few_streams, of_few, one_streams
from moe_ops.backends.triton_tiles import rows_of_codes
from moe_ops.kernels.triton.experts.products.register_stream import Streams
from moe_ops.kernels.triton.experts.products.rows import RowsTiles
from moe_ops.testing import LAYERS
from tests.kernels.codes import unfilled

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "benchmarks/results/float4_tiles_h200.json").read_text())["tiles"]
H200_MEMORY = 227 * 1024


def chosen(cell: dict[str, Any]) -> Streams | RowsTiles:
    case = LAYERS[cell["layer"]]
    layer = unfilled((cell["format"], ""), (case.E, case.D, case.I))
    if cell["tokens"] == 1:
        return one_streams(case.K, layer)
    rows_per_expert = cell["tokens"] * case.K / case.E
    streams = few_streams(rows_per_expert, layer)
    return streams or rows_of_codes(rows_per_expert, case.I, layer.codes, H200_MEMORY)


def spelled(tiles: Streams | RowsTiles) -> str:
    """As the file of times has it."""
    if isinstance(tiles, Streams):
        return " ".join(
            f"{name}[S{s.S} MT{s.MT} NT{s.NT} C{s.C} a{s.ahead}]"
            for name, s in (("up", tiles.up), ("dn", tiles.down))
        )
    sizes = [f"{t.rows},{t.stages},w{t.warps}" for t in (tiles.up, tiles.down)]
    return f"rows BN{tiles.up.BN} up {sizes[0]} down {sizes[1]}"


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=f"{c['layer']} {c['tokens']} {c['format']}") for c in CELLS],
)
def test_no_tile_that_was_tried_is_much_faster(cell: dict[str, Any]) -> None:
    times = {tiles: us for us, tiles in cell["tried"]}
    assert times[spelled(chosen(cell))] <= 1.05 * min(times.values())


@pytest.mark.parametrize(
    ("name", "tokens", "format", "alone"),
    [
        ("gpt_oss_20b", 2, "mxfp4", (False, True)), ("gpt_oss_20b", 4, "mxfp4", (False, False)),
        ("qwen3_30b", 2, "mxfp4", (True, True)), ("qwen3_30b", 3, "mxfp4", (False, False)),
        ("olmoe", 2, "mxfp4", (True, True)), ("olmoe", 2, "nvfp4", (False, False)),
        ("qwen3_next", 2, "mxfp4", (False, False)), ("mixtral_8x7b", 2, "mxfp4", (False, False)),
    ],
)  # fmt: skip
def test_a_warp_is_a_program_where_larger_ones_would_be_few(
    name: str, tokens: int, format: str, alone: tuple[bool, bool]
) -> None:
    case = LAYERS[name]
    layer = unfilled((format, ""), (case.E, case.D, case.I))
    x_TD = torch.empty(tokens, case.D, dtype=torch.bfloat16, device="meta")
    ids_TK = torch.empty(tokens, case.K, dtype=torch.int32, device="meta")
    streams = of_few(x_TD, ids_TK, layer, None)
    assert tuple(stream.warps == 1 for stream in (streams.up, streams.down)) == alone
