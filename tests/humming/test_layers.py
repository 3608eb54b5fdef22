"""Humming among what `bench layer` times: what it is handed, against float32 by a stand-in."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.bench import cells, grid, humming, rates
from moe_ops.bench.formats import parse
from moe_ops.bench.inputs import make_routed, make_weights
from moe_ops.testing import Case

CASE = Case(name="tiled", T=24, E=4, K=2, D=256, I=128)
RATES = rates.Rates(copy_tbs=0.03, matmul_tflops=0.1, matmul8_tflops=0.1)
by_format = pytest.mark.parametrize("format", humming.FORMATS)


def measured(format: str, case: Case = CASE, dtype: torch.dtype = torch.bfloat16) -> cells.Cell:
    asked = cells.Grid(
        layers=[case],
        tokens=[case.T],
        routings=["zipf"],
        contenders=lambda case: [grid.contender(case, "cpu", "humming")],
        dtype=dtype,
        device=torch.device("cpu"),
        seconds=0.01,
        quant=parse(format) if format else None,
    )
    (cell,) = cells.measure(asked, RATES)
    return cell


@pytest.mark.usefixtures("stand_in")
@by_format
def test_it_is_right_and_timed(format: str) -> None:
    pytest.importorskip("triton", reason="a kernel of Triton's sums what experts make")
    cell = measured(format)
    assert cell.wrong == cell.refused == "" and cell.us
    assert cell.ran == {}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "floats": ("", {}, "got weights that are not quantised with torch.bfloat16"),
    "scales": ("int4:1x128", {}, "got int4:1x128 with torch.bfloat16; choose one by --format"),
    "zeros": ("uint4:1x128:bfloat16", {}, "got uint4:1x128:bfloat16 with torch.bfloat16"),
    "dtype": ("mxfp4", {"dtype": torch.float16}, "got mxfp4 with torch.float16"),
    "sizes": (
        "mxfp4", {"case": replace(CASE, D=320)},
        "has no tiles for weights of 320 rows by 128 columns",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("format", "more", "said"), REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_take_is_said(format: str, more: dict[str, Any], said: str) -> None:
    cell = measured(format, **more)
    assert cell.wrong == "" and said in cell.refused


@pytest.mark.parametrize("there", [False, True], ids=["no_package", "no_gpu"])
def test_what_a_machine_lacks_is_said(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("torch") if there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    cell = measured("mxfp4")
    lacks = "needs a CUDA GPU, got cpu" if there else "the package humming-kernels is not installed"
    assert cell.refused == lacks
    assert (humming.missing(torch.device("cuda")) is None) == there


def decoded(tensors: dict[str, Tensor], config: Any) -> Tensor:
    """Values [E, N, K] by what Humming documents: eight codes in a word, the first in the lowest
    bits; uint4 is the value + 8; float4e2m1 has a sign, two bits of exponent, one of mantissa."""
    words = tensors["weight"]
    codes = torch.stack([words >> 4 * i & 15 for i in range(8)], -1).flatten(-2)
    values = codes.float() - 8
    if config["dtype"] == "float4e2m1":
        exponent, mantissa = codes >> 1 & 3, (codes & 1) / 2
        normal = (1 + mantissa) * torch.exp2(exponent.float() - 1)
        values = torch.where(exponent > 0, normal, mantissa) * (1 - 2 * (codes >> 3))
    return values * tensors["weight_scale"].float().repeat_interleave(config["group_size"], -1)


@by_format
def test_weights_decode_to_the_same_values(format: str) -> None:
    weights = make_weights(CASE, torch.bfloat16, torch.Generator().manual_seed(0), parse(format))
    stored, wants = humming.FORMATS[format], [weights.expert(e) for e in range(CASE.E)]
    for i, (codes, scale) in enumerate(
        ((weights.w13_EFD, "w13_scale_EFG"), (weights.w2_EDI, "w2_scale_EDG"))
    ):
        tensors = humming.tensors_of(codes, weights.beside[scale], stored)
        got = decoded(tensors, stored.weights)
        assert torch.equal(got, torch.stack([want[i] for want in wants]))


@pytest.mark.parametrize("block", [8, 24, 80])
@pytest.mark.parametrize("routing", ["uniform", "zipf"])
@pytest.mark.parametrize("T", [1, 7, 64])
def test_an_order_has_every_pair_once_in_a_tile_of_its_expert(
    T: int, routing: str, block: int
) -> None:
    case = replace(CASE, T=T, E=16)
    g = torch.Generator().manual_seed(T)
    ids_TK = make_routed(case, T, routing, torch.bfloat16, g).ids_TK
    order = humming.order_of(ids_TK, case.E, block)
    assert all(t.dtype is torch.int32 for t in order.values())
    tiles = order["sorted_ids"].view(-1, block)
    assert order["num_tokens_padded"].tolist() == [tiles.numel()]
    assert order["expert_ids"].shape == (len(tiles),)
    assert order["expert_ids"].diff().ge(0).all()
    pairs = tiles[tiles < ids_TK.numel()]
    assert pairs.sort().values.tolist() == list(range(ids_TK.numel()))
    assert (tiles[tiles >= ids_TK.numel()] == ids_TK.numel()).all()
    for tile, expert in zip(tiles, order["expert_ids"].tolist(), strict=True):
        own = tile[tile < ids_TK.numel()]
        assert len(own) and (ids_TK.flatten()[own.long()] == expert).all()
    assert len(tiles) == sum(-(-n // block) for n in ids_TK.flatten().bincount().tolist())
