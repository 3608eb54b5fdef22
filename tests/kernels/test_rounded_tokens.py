"""Tokens that products round to codes as they load them: the codes of `quantize`, by torch, see
`gluon_in_torch.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends import triton_hopper
from moe_ops.backends.triton import (
    TENSORS,
    formats_named,
    layer_of,
    run_experts,
    tensors_of,
)
from moe_ops.backends.triton_streams import one_streams
from moe_ops.kernels.triton.experts.products import register_stream
from moe_ops.kernels.triton.experts.products.register_stream import Stream, Streams
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, DEVICE, F16, Case
from tests.chosen import in_turn
from tests.kernels import gluon_in_torch
from tests.kernels.offline_codes import quantized_call
from tests.kernels.test_quantized_experts import BLOCK_FLOAT8, call_of

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")

ONE = Streams(up=Stream(S=4, C=4), down=Stream(S=8, C=2))
TWO = Streams(up=Stream(S=2, NT=2), down=Stream(S=3, NT=2))  # tiles of tokens
FORMATS = {
    "groups": BLOCK_FLOAT8,
    "rows": ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    "int8": ("int8:tensor", "int8:row"),
}
TOKENS = {"usual": None, "nan": float("nan"), "infinite": float("inf"), "tiny": 1e-14, "zero": 0.0}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products that were launched."""
    monkeypatch.setattr(triton_hopper, "refuse_hopper", lambda _: None)
    return gluon_in_torch.take_over(register_stream, monkeypatch)


def run(call: ExpertsCall, tiles: Streams, up: bool, down: bool) -> Tensor:
    tiles = Streams(up=replace(tiles.up, rounds=up), down=replace(tiles.down, rounds=down))
    return run_experts("tiny/stream", call, tiles=tiles)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@in_turn(
    pytest.mark.parametrize("tokens", TOKENS),
    pytest.mark.parametrize("formats", FORMATS),
    pytest.mark.parametrize("tiles", [ONE, TWO], ids=["one", "two"]),
)
def test_the_bits_of_tokens_that_were_rounded_before(
    tiles: Streams, formats: str, tokens: str, launched: list[str]
) -> None:
    """Whatever the token is; and an expert that is elsewhere adds nothing."""
    case = Case(name=formats, T=1, E=6, K=3, D=288, I=160)
    dtype = F16 if tokens in ("usual", "infinite") else BF16
    call = call_of(case, *FORMATS[formats], dtype=dtype)
    call.x_TD[0, 5] *= 30
    call.ids_TK[0, 1], call.weights_TK[0, 1] = 7, float("nan")
    value = TOKENS[tokens]
    if value is not None:
        wide = value in (0.0, 1e-14)
        call.x_TD[0, slice(None) if wide else 7] *= value
    want = run(call, tiles, False, False)
    assert launched == ["one_up", "one_down"]
    for up, down in ((True, True), (True, False), (False, True)):
        assert same(run(call, tiles, up, down), want)
    assert bool(want.isnan().all()) == (tokens in ("nan", "infinite"))


@pytest.mark.parametrize("scales", ["given", "static", "of_all"])
def test_tokens_that_are_not_rounded_there(scales: str, launched: list[str]) -> None:
    """Those that came as codes, and those by scales that are given or that all choices share."""
    case = Case(name=scales, T=1, E=4, K=2, D=256, I=128)
    formats = FORMATS["rows"] if scales == "given" else ("int8:row", "int8:tensor")
    call = call_of(case, *formats, dtype=BF16)
    if scales == "static":
        scale = torch.tensor([0.02])
        call = replace(call, x_scale=scale, h_scale=scale)
    elif scales == "given":
        done = packing.quantize(call.x_TD, Format.of(formats[1]))
        call = replace(call, x_TD=done.values, x_scale_TG=done.scale, out_dtype="bfloat16")
    assert same(run(call, ONE, True, True), run(call, ONE, False, False))
    assert launched == ["one_up", "one_down"] * 2


# Whether the tables round x and h, and the steps ahead of both products.
TABLES = [
    ("groups", (2048, 768), (True, True, 4, 4)),
    ("groups", (2880, 2880), (False, True, 2, 2)),
    ("rows", (2048, 768), (True, True, 2, 2)),
    ("int8", (4096, 14336), (True, True, 2, 2)),
]


@pytest.mark.parametrize(("formats", "widths", "wanted"), TABLES)
def test_what_the_tables_round(
    formats: str, widths: tuple[int, int], wanted: tuple[bool, bool, int, int]
) -> None:
    case = Case(name=formats, T=1, E=1, K=1, D=widths[0], I=widths[1])
    call = quantized_call(case, 1, *FORMATS[formats])
    named = dict(zip(TENSORS, tensors_of(call), strict=True))
    layer = layer_of(named, call.transposed, call.activation, formats_named(call))
    tiles = one_streams(4, layer)
    found = (tiles.up.rounds, tiles.down.rounds, tiles.up.ahead, tiles.down.ahead)
    assert found == wanted
    assert tiles.down.registers == (0 if wanted[0] else 128)


def every(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every magnitude from 1 to 2 of a dtype of 16 bits, or of float16 every seventh, and each with
    all smaller ones that are more than 2**-13 of it."""
    bits = 7 if dtype == BF16 else 10
    m_N = 1 + torch.arange(0, 2**bits, 1 if dtype == BF16 else 7).double() / 2**bits
    x_M = (m_N[:, None] * 2.0 ** -torch.arange(0, 13)).flatten()
    x_NM = torch.where(x_M[None, :] <= m_N[:, None], x_M[None, :], 0.0)
    return m_N.to(dtype), x_NM.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("element", ["float8_e4m3fn", "int8"])
def test_products_with_inverses_have_the_codes_of_quotients(
    element: str, dtype: torch.dtype
) -> None:
    functions = gluon_in_torch.functions()
    largest_N, x_NM = every(dtype)
    want = packing.quantize(torch.cat((largest_N[:, None], x_NM), 1), Format.of(f"{element}:row"))
    value, INT8 = gluon_in_torch.value, element == "int8"
    scale, inverse, rest = functions["factors_of"](value(largest_N.float()), INT8)
    assert torch.equal(scale, want.scale[:, 0])
    pad = -x_NM.shape[1] % 4
    x = value(torch.nn.functional.pad(x_NM, (0, pad)))[:, None]
    words = functions["words_by"](x, inverse[:, None, None], rest[:, None, None], INT8)
    got = torch.as_tensor(words).contiguous().view(torch.int8)[:, 0, : x_NM.shape[1]]
    assert torch.equal(got, want.values[:, 1:].view(torch.int8))
