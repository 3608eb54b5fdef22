"""Weights of four bits with tokens of float8 that are multiplied as codes, by every tile: right,
and the same to the bit; each row by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_ops.backends.triton import run_experts
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import ACTIVATIONS, Case

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends import triton_hopper
from moe_ops.backends.triton_tiles import FLOAT8_TILES, float8_tile
from tests.gpu.test_other_formats import MOST_ERROR, layer_of, wanted
from tests.gpu.test_quantized_kernels import WIDTHS, hopper, relative_error, uneven

pytestmark = [pytest.mark.gpu, hopper]

ROW, TENSOR, INT4 = "float8_e4m3fn:row", "float8_e4m3fn:tensor", "int4:1x128:bfloat16"
GROUPS = "float8_e4m3fn:1x128"
FORMATS = (
    ("mxfp4", ROW), ("mxfp4", TENSOR), (INT4, ROW), ("int4:row", ROW),
    ("uint4:1x128:float16", ROW), (INT4, GROUPS), ("uint4:1x128:float16", GROUPS),
    ("mxfp4", "mxfp8"),
)  # fmt: skip
BF16, F16 = torch.bfloat16, torch.float16
# Columns that fill neither steps nor groups, rows of W that fill no tile, and scales no words.
RAGGED = Case(name="ragged", T=1, E=5, K=3, D=1056, I=544)
STATIC = {"x_scale": 0.011, "h_scale": 2e-3}
CASES = {n: WIDTHS[n] for n in ("qwen3_30b", "gpt_oss_20b")} | {"ragged": RAGGED}
each_formats = pytest.mark.parametrize("formats", FORMATS, ids="+".join)


def of_tile(call: ExpertsCall, tokens: int, blocks: int) -> Tensor:
    assert triton_hopper.refuse_float8(call) is None
    return run_experts("grouped/float8", call, tiles=float8_tile(tokens, blocks))


def same_by_all(call: ExpertsCall) -> list[Tensor]:
    """What tiles give, to the bit: of those whose scales of W become no part of codes, and of those
    where they do, which add them up in another order."""
    found: dict[bool, Tensor] = {}
    for tile in (*FLOAT8_TILES, FLOAT8_TILES[0]):
        got = of_tile(call, *tile)
        want = found.setdefault(float8_tile(*tile).fold, got)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return list(found.values())


@each_formats
@pytest.mark.parametrize("name", CASES)
def test_every_tile(name: str, formats: tuple[str, str]) -> None:
    for T in (1, 6, 40, 150, 700):
        call = layer_of(CASES[name], T, formats, BF16)
        for got in same_by_all(call):
            assert relative_error(got, wanted(call)) <= MOST_ERROR["8"], T


@pytest.mark.parametrize(
    "given", [("x_scale",), ("h_scale",), ("x_scale", "h_scale")], ids="+".join
)
@pytest.mark.parametrize("name", ["qwen3_30b", "ragged"])
def test_static_scales(name: str, given: tuple[str, ...]) -> None:
    """By some of which h saturates."""
    for T in (40, 700):
        call = layer_of(CASES[name], T, (INT4, TENSOR), BF16)
        call = replace(call, **{n: torch.tensor([STATIC[n]], device="cuda") for n in given})
        want = wanted(call)
        for got in same_by_all(call):
            assert relative_error(got, want) <= MOST_ERROR["8"], T


@pytest.mark.parametrize("name", ["gpt_oss", "ungated_relu2"])
def test_activations(name: str) -> None:
    for T in (6, 200):
        call = layer_of(RAGGED, T, (INT4, ROW), BF16, **ACTIVATIONS[name])
        for got in same_by_all(call):
            assert relative_error(got, wanted(call)) <= MOST_ERROR["8"], T


@each_formats
def test_rows_that_lie_unevenly(formats: tuple[str, str]) -> None:
    """Experts of no rows, of a few and of many tiles."""
    call = uneven(layer_of(RAGGED, 500, formats, F16))
    for got in same_by_all(call):
        assert relative_error(got, wanted(call)) <= MOST_ERROR["8"]
        assert not bool(got[3].any())


def scaled_apart(call: ExpertsCall) -> ExpertsCall:
    """Scales of some rows of W are far from each other, and one is NaN."""
    w13, w2 = call.w13_scale_EFG.clone(), call.w2_scale_EDG.clone()
    w13[1, 70::7, 3] -= 13
    w2[:, 1:1000:5, ::3] -= 40
    w2[2, 65, 1] = 255
    return replace(call, w13_scale_EFG=w13, w2_scale_EDG=w2)


@pytest.mark.parametrize("inputs", [ROW, "mxfp8"])
@pytest.mark.parametrize("name", ["qwen3_30b", "gpt_oss_20b"])
def test_scales_that_are_no_part_of_codes(name: str, inputs: str) -> None:
    call = scaled_apart(layer_of(name, 200, ("mxfp4", inputs), BF16))
    want, nan = wanted(call), (call.ids_TK == 2).any(1)
    others = torch.arange(want.shape[1], device="cuda") != 65
    for got in same_by_all(call):
        assert torch.equal(got[:, 65].isnan(), nan)
        assert relative_error(got[:, others], want[:, others]) <= MOST_ERROR["8"]


@each_formats
def test_a_token_of_nan_is_alone(formats: tuple[str, str]) -> None:
    if formats[1] == TENSOR:
        pytest.skip("the scale of all tokens is that of NaN")
    call = layer_of("qwen3_30b", 70, formats, BF16)
    want = same_by_all(call)
    x_TD = call.x_TD.clone()
    x_TD[5, 600] = torch.nan
    others = torch.arange(70, device="cuda") != 5
    for got, before in zip(same_by_all(replace(call, x_TD=x_TD)), want, strict=True):
        assert bool(got[5].isnan().all())
        assert torch.equal(got[others], before[others])


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("gpt_oss_20b", ("mxfp4", ROW)), ("gpt_oss_20b", ("mxfp4", "mxfp8")),
        ("qwen3_30b", (INT4, GROUPS)),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_that_come_as_codes(name: str, formats: tuple[str, str]) -> None:
    call = layer_of(name, 60, formats, BF16)
    done = packing.quantize(call.x_TD, Format.of(formats[1]))
    given = replace(call, x_TD=done.values, x_scale_TG=done.scale, out_dtype="bfloat16")
    for got, want in zip(same_by_all(given), same_by_all(call), strict=True):
        assert torch.equal(got, want)


def test_more_than_2_to_the_31_elements() -> None:
    """Of h, whose last rows are those of single tokens."""
    call = layer_of("qwen3_30b", 700_000, ("mxfp4", ROW), BF16)
    assert call.ids_TK.numel() * call.widths[1] > 2**31
    got = of_tile(call, *FLOAT8_TILES[-1])
    x_TD, ids_TK, weights_TK = (
        t[-300:].contiguous() for t in (call.x_TD, call.ids_TK, call.weights_TK)
    )
    few = replace(call, x_TD=x_TD, ids_TK=ids_TK, weights_TK=weights_TK)
    assert torch.equal(got[-300:], of_tile(few, *FLOAT8_TILES[-1]))
