"""`quantize_model` keeps the weights of experts that a format does not divide, as a layer refuses
them."""

import pytest
import torch

import moe_ops
from tests.hf.test_quantize_groups import model_of

D, I = 32, 48  # noqa: E741  the legend's letter
FP8 = "float8_e4m3fn"
KEPT = {
    "rows_of_w2": ("int8:24x16", "columns of a multiple of 24, got 32"),
    "rows_of_both": ("int8:7x16", "columns of a multiple of 7, got 96"),
    "columns_of_w13": ("uint4:48x48", "rows of a multiple of 48, got 32"),
    "columns_of_w2": ("int4:1x32", "rows of a multiple of 32, got 48"),
    "published": ("mxfp8_w8a16", "rows of a multiple of 32, got 48"),
}
WHOLE = ("uint4:16x16", "int8:32x16", "int8:row", "int8:tensor")
RAGGED = (f"{FP8}:128x128", f"{FP8}:24x20", f"{FP8}:1x40")


def layer_of(quant: str) -> moe_ops.MoELayer:
    return moe_ops.MoELayer(num_experts=4, top_k=2, hidden_size=D, intermediate_size=I, quant=quant)


@pytest.mark.parametrize(("format", "reason"), KEPT.values(), ids=KEPT)
def test_what_does_not_fill_its_groups_is_kept(format: str, reason: str) -> None:
    model = model_of(D, I)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    report = moe_ops.quantize_model(model, format, progress=False)
    (line,) = report.kept
    assert report.modules == 0 and line.endswith(f"wants {reason}")
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])
    with pytest.raises(ValueError, match="which do not fill"):
        layer_of(format)


@pytest.mark.parametrize("format", (*WHOLE, *RAGGED))
@torch.inference_mode()
def test_whole_groups_and_ragged_float8_are_quantized(format: str) -> None:
    model, ids = model_of(D, I), torch.arange(9)[None]
    want = model(input_ids=ids).logits
    report = moe_ops.quantize_model(model, format, progress=False)
    assert (report.modules, report.kept) == (1, ())
    error = float((model(input_ids=ids).logits - want).norm() / want.norm())
    assert 0 < error < (0.3 if "4:" in format else 0.05)
    layer_of(format)
