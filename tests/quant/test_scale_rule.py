"""The two rules for scales that are powers of two: of OCP Microscaling, and without saturation."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from tests.hf.test_quantize import qwen


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp8", "mxfp8_e5m2"])
def test_scales_by_ceil_are_the_smallest_by_which_nothing_saturates(name: str) -> None:
    format = Format.of(name)
    x = torch.randn(64, 320) * torch.rand(64, 1).exp2() * 2.0 ** torch.randint(-30, 30, (64, 1))
    x[0, :32] = 0.0
    x[1, :32] = 2.0**-149
    x[2, :32] = format.largest * 2.0**4  # is reached exactly
    done = packing.quantize(x, format, scale_rule="ceil")
    scale = packing.decode_scale(done.scale, "e8m0")
    largest = x.abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((largest <= scale * format.largest * (1 + 2**-22)).all())
    lower = largest > scale * format.largest / 2
    assert bool((lower | (done.scale <= 1)).all())
    assert float(scale[2, 0]) == 2.0**4
    errors = [
        float((packing.dequantize(q.values, q.scale, format) - x).norm())
        for q in (done, packing.quantize(x, format))
    ]
    assert errors[0] <= errors[1] * (0.95 if name == "mxfp8" else 1.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_group_that_is_no_number_has_no_scale_by_ceil(bad: float) -> None:
    x = torch.randn(2, 64)
    x[1, 40] = bad
    done = packing.quantize(x, Format.of("mxfp8"), scale_rule="ceil")
    assert (done.scale == packing.E8M0_NAN).tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize(
    ("name", "rule", "match"),
    [
        ("int4:1x32", "ceil", "'ceil' is for e8m0 scales, but int4:1x32 has scales of float32"),
        ("nvfp4", "ceil", "is for e8m0 scales, but nvfp4 has scales of float8_e4m3fn"),
        ("mxfp8", "up", "scale_rule"),
    ],
)
def test_a_rule_that_is_not_for_the_scales_is_refused(name: str, rule: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        packing.quantize(torch.randn(2, 64), Format.of(name), scale_rule=rule)


def test_inputs_and_models_take_the_rule() -> None:
    x = torch.randn(3, 64)
    want = packing.quantize(x, Format.of("mxfp8"), scale_rule="ceil")
    got = moe_ops.quantize(x, "mxfp8", scale_rule="ceil")
    assert torch.equal(got[0].view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got[1], want.scale) and not torch.equal(
        got[1], moe_ops.quantize(x, "mxfp8")[1]
    )
    with pytest.raises(ValueError, match="'ceil' is for e8m0 scales, but int8:row"):
        moe_ops.quantize(x, "int8:row", scale_rule="ceil")
    model = qwen()
    floats = model.model.layers[0].mlp.experts.down_proj[1].detach().clone()
    with pytest.raises(ValueError, match="'ceil' is for e8m0 scales"):
        moe_ops.quantize_model(model, "int4_w4a16", scale_rule="ceil", progress=False)
    moe_ops.quantize_model(model, "mxfp8_w8a16", scale_rule="ceil", progress=False)
    want = packing.quantize(floats, Format.of("mxfp8"), scale_rule="ceil")
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj_scale[1], want.scale)
