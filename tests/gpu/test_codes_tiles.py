"""Tiles of codes that are decoded in registers, of every number of tokens: what they give is the
same to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_ops import experts
from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_support import weight_of
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import Case, make_layer

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_tiles import CODES_TILES, codes_tile
from moe_ops.kernels.triton.experts.products.grouped_tile import CodesTile
from tests.gpu.test_other_formats import MOST_ERROR, wanted
from tests.gpu.test_quantized_kernels import WIDTHS, hopper, relative_error, uneven
from tests.kernels.codes import quantized

pytestmark = [pytest.mark.gpu, hopper]

FORMATS = (
    "int4:1x32:bfloat16", "uint4:1x32", "mxfp4", "nvfp4", "float8_e4m3fn:row", "mxfp8", "mxfp6_e3m2"
)  # fmt: skip
*SMALLER, MANY_TOKENS = [tile for _, tile in CODES_TILES]
# Of the fewest steps along K, fewer than a ring has stages; and of many.
CASES = {
    "fewest_steps": Case(name="fewest_steps", T=1, E=7, K=3, D=288, I=288),
    **{name: WIDTHS[name] for name in ("odd", "dsv3")},
}
each_format = pytest.mark.parametrize("w_format", FORMATS)


def layer_of(case: Case, T: int, w_format: str, dtype: torch.dtype = torch.bfloat16) -> ExpertsCall:
    layer = make_layer(replace(case, T=T), dtype, "cuda")
    weights = quantized(layer.w13_EFD, layer.w2_EDI, w_format)
    given = (layer.x_TD, layer.weights_TK, layer.ids_TK, weights.pop("w13"), weights.pop("w2"))
    call: ExpertsCall = experts.call(*given, layer.b13_EF, layer.b2_ED, **weights)
    experts.check(call)
    return call


def of_tile(call: ExpertsCall, tile: CodesTile) -> Tensor:
    return run_experts("grouped", call, tiles=codes_tile(tile, weight_of(call)))


@each_format
@pytest.mark.parametrize("name", CASES)
def test_tiles_give_the_same_bits(name: str, w_format: str) -> None:
    for T in (1, 6, 40, 150, 700):
        call = layer_of(CASES[name], T, w_format)
        want = of_tile(call, MANY_TOKENS)
        assert relative_error(want, wanted(call)) <= MOST_ERROR[""], T
        for tile in SMALLER:
            got = of_tile(call, tile)
            assert torch.equal(got, want), (T, tile)
            assert torch.equal(of_tile(call, tile), got), (T, tile)


@each_format
def test_rows_that_lie_unevenly(w_format: str) -> None:
    """Experts of no rows, of a few and of many tiles."""
    call = uneven(layer_of(WIDTHS["odd"], 500, w_format))
    want = of_tile(call, MANY_TOKENS)
    for tile in SMALLER:
        assert torch.equal(of_tile(call, tile), want), tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rows_of_a_call_change_none_of_its_bits(dtype: torch.dtype) -> None:
    """A token among few and among many, in the same tile."""
    call = layer_of(WIDTHS["odd"], 60, "int4:1x32:bfloat16", dtype)
    few = {n: getattr(call, n)[:9].contiguous() for n in ("x_TD", "weights_TK", "ids_TK")}
    for _, tile in CODES_TILES:
        got = of_tile(replace(call, **few), tile)
        assert torch.equal(got, of_tile(call, tile)[:9]), tile
