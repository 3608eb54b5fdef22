"""`quantize_model` takes any group of integer weights that divides the widths of the experts."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ops
from moe_ops.quant.config import QuantConfig
from tests.chosen import in_turn

WIDTHS = {"1x16": (64, 48), "1x48": (96, 48), "1x96": (192, 96), "1x256": (512, 256)}


def model_of(D: int, I: int) -> Qwen3MoeForCausalLM:  # noqa: E741  the legend's letter
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=I, intermediate_size=I, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64, num_experts=4,
        num_experts_per_tok=2, initializer_range=0.1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


@in_turn(
    pytest.mark.parametrize("element", ["int4", "uint4", "int8", "uint8"]),
    pytest.mark.parametrize("group", WIDTHS),
)
@torch.inference_mode()
def test_a_model_in_groups_of_other_sizes_stays_near(group: str, element: str) -> None:
    format, ids = f"{element}:{group}", torch.arange(9)[None]
    want = model_of(*WIDTHS[group])(input_ids=ids).logits
    found = []
    for scheme, more in (
        (format, {}),
        (QuantConfig(weights=format), {}),
        (f"int{element[-1]}_w{element[-1]}a16", {"weight_format": format}),
    ):
        model = model_of(*WIDTHS[group])
        report = moe_ops.quantize_model(model, scheme, progress=False, **more)
        assert (report.modules, report.kept) == (1, ())
        assert report.bytes_after < 0.3 * report.bytes_before + report.bytes_before / 16
        found.append(model(input_ids=ids).logits)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    error = float((found[0] - want).norm() / want.norm())
    assert 0 < error < (0.3 if "4" in element else 0.03)
