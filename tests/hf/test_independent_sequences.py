"""A sequence of a quantised model gets the same logits beside other sequences as alone."""

import pytest
import torch

import moe_ops
from moe_ops.hf.stored import stored_format
from tests.chosen import those_of
from tests.hf.test_quantize_groups import model_of

# What `quantize_model` makes of inputs, where a name does not say it.
SCHEMES = {
    "nvfp4_w4a4": "nvfp4",
    "mxfp4_w_fp8_a": "float8_e4m3fn:row",
    "mxfp6_e3m2_w_fp8_a": "float8_e4m3fn:row",
    "mxfp6_e2m3_w_fp8_a": "float8_e4m3fn:row",
    "int8_w8a8": "int8:row",
    "fp8_w8a8": "float8_e4m3fn:1x128",
    "mxfp8": "mxfp8",
}


@pytest.mark.parametrize("scheme", those_of(["nvfp4_w4a4", "mxfp4_w_fp8_a"], SCHEMES))
@torch.inference_mode()
def test_a_mate_changes_nothing(scheme: str) -> None:
    model = model_of(128, 128)
    moe_ops.quantize_model(model, scheme, progress=False)
    # A token in every way a thousand times as large as those of the other sequence.
    model.model.embed_tokens.weight[63] *= 1000
    ids = torch.arange(1, 19).view(2, 9)
    ids[1, 4] = 63
    both, alone = model(input_ids=ids).logits[0], model(input_ids=ids[:1]).logits[0]
    assert float((both - alone).abs().max()) <= 1e-5 * float(alone.abs().max())


def test_rows_have_scales_of_their_own_by_default() -> None:
    for scheme, inputs in SCHEMES.items():
        model = model_of(128, 128)
        report = moe_ops.quantize_model(model, scheme, progress=False)
        assert report.modules == 1
        experts = model.model.layers[0].mlp.experts
        assert stored_format(experts).x_format == inputs, scheme
