"""ggml's K quants and NF4: what codes stand for, and what is coded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import moe_ops
from moe_ops.quant import packing
from moe_ops.quant.elements.k_quants import K_QUANTS, reordered
from moe_ops.quant.elements.kinds import Table
from moe_ops.quant.elements.nf4 import NF4
from moe_ops.quant.formats import Format
from tests.quant.blocks import K_FORMATS, any_ggml, specified

each_format = pytest.mark.parametrize("format", [*K_FORMATS, "nf4"])
# How much of a normal matrix the best of ours loses, and a bit more.
LOSS = {"q4_k": 0.09, "q5_k": 0.045, "q6_k": 0.02, "nf4": 0.1}


@pytest.mark.parametrize("kind", K_QUANTS)
def test_blocks_stand_for_what_is_specified_to_the_bit(kind: str) -> None:
    raw = any_ggml(kind, rows=6, columns=1024)
    blocks = reordered(torch.from_numpy(raw), kind)
    assert blocks.shape == raw.shape
    assert torch.equal(K_QUANTS[kind].decode(blocks), specified(raw, kind))


def test_nf4_is_the_table_in_blocks_of_64() -> None:
    codes, scale = torch.arange(256) % 16, torch.rand(1, 4)
    got = packing.dequantize(packing.pack(codes[None].byte(), "nf4"), scale, Format.of("nf4"))
    table = np.array(NF4.table, np.float32)
    want = table[codes.numpy()] * scale[0].numpy().repeat(64)
    assert torch.equal(got[0], torch.from_numpy(want))


@each_format
def test_values_are_coded_closely(format: str) -> None:
    x, of = torch.randn(16, 512), Format.of(format)
    x[0] = 0
    done = packing.quantize(x, of)
    got = packing.dequantize(done.values, done.scale, of)
    assert float((got - x).norm() / x.norm()) < LOSS[format]
    assert torch.equal(got[0], x[0])
    again = packing.quantize(got, of)  # what can be coded is
    twice = packing.dequantize(again.values, again.scale, of)
    assert float((twice - got).norm() / got.norm()) < LOSS[format] / 4


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_seen(format: str, bad: float) -> None:
    x, of = torch.ones(2, 512), Format.of(format)
    x[0, 3] = bad
    done = packing.quantize(x, of)
    got = packing.dequantize(done.values, done.scale, of)
    assert bool(got[0, :64].isnan().all())


@pytest.mark.parametrize("width", [1, 192, 320])
@pytest.mark.parametrize("format", K_FORMATS)
def test_values_that_fill_no_blocks_are_refused(format: str, width: int) -> None:
    said = rf"{format} wants values in multiples of 256 on the last axis, got shape \(2, {width}\)"
    with pytest.raises(ValueError, match=said):
        packing.quantize(torch.ones(2, width), Format.of(format))


@pytest.mark.parametrize(("D", "I"), [(384, 256), (256, 384), (64, 256)])
@pytest.mark.parametrize("format", K_FORMATS)
def test_experts_of_widths_that_fill_no_blocks_are_refused(format: str, D: int, I: int) -> None:  # noqa: E741
    """Though their codes have the shapes of whole blocks, of which one would be left out."""
    units = Format.of(format).parsed.storage.units
    w13, w2 = (torch.zeros(2, rows, units, dtype=torch.uint8) for rows in (2 * I, D))
    scales = {"w13_scale_EFG": torch.ones(2, 1, 1), "w2_scale_EDG": torch.ones(2, 1, 1)}
    said = (
        rf"w_format='{format}' packs 256 values together; pad the width {D if D != 256 else I} to"
    )
    with pytest.raises(ValueError, match=said):
        moe_ops.experts(
            torch.ones(3, D), torch.ones(3, 1), torch.zeros(3, 1).long(), w13, w2,
            w_format=format, **scales,
        )  # fmt: skip


@each_format
def test_a_layer_is_refused_by_its_width(format: str) -> None:
    values = Format.of(format).parsed.storage.values
    group = max(values, 64)
    with pytest.raises(ValueError, match=rf"to a multiple of {group}: hid"):
        moe_ops.MoELayer(2, 1, 96, 256, quant=moe_ops.QuantConfig(weights=format))


def test_a_table_has_a_value_for_each_code() -> None:
    with pytest.raises(ValueError, match="two has 2 values for codes of 4 bits; give 16 that asc"):
        Table(name="two", storage=NF4.storage, table=(0.0, 1.0))
