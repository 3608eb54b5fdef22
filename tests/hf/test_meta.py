"""Weights without memory are not quantised; codes are offloaded as other weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ops
from tests.hf.coded_linears import coded
from tests.hf.test_quantize import logits, qwen
from tests.hf.test_quantized_linears import quantized
from tests.hf.test_saved import check_same

GIVEN: dict[str, dict[str, Any]] = {
    "mlp.experts.gate_up_proj": {"scheme": "int8_w8a16"},
    "self_attn.q_proj.weight": {"scheme": None, "linear_format": "nvfp4"},
    "lm_head.weight": {"scheme": None, "head_format": "int8:row"},
}


def offloaded(model: Any, **how: bool) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), **how)
    assert all(p.is_meta for p in model.parameters())
    return model


@pytest.mark.parametrize(("name", "given"), GIVEN.items(), ids=GIVEN)
@pytest.mark.parametrize("place", [lambda m: m.to("meta"), offloaded], ids=["meta", "offloaded"])
def test_weights_without_numbers_are_refused(place: Any, name: str, given: dict[str, Any]) -> None:
    model = place(qwen())
    before = {n: (t.shape, t.dtype) for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"{name} is on the meta device, .*; load the weights fi"):
        moe_ops.quantize_model(model, progress=False, **given)
    assert {n: (t.shape, t.dtype) for n, t in model.state_dict().items()} == before
    assert not coded(model) and not hasattr(model, "_moe_ops_state")


def test_what_is_not_quantized_may_be_elsewhere() -> None:
    model = qwen()
    model.model.embed_tokens.to("meta")
    moe_ops.quantize_model(model, None, head_format="int8:row", progress=False)
    assert list(coded(model)) == ["lm_head"]


@pytest.mark.parametrize("buffers", [False, True], ids=["weights", "and_scales"])
def test_codes_that_are_offloaded_run_and_are_saved(buffers: bool, tmp_path: Path) -> None:
    model = quantized()
    want = logits(model)
    offloaded(model, offload_buffers=buffers)
    for _ in range(2):
        assert torch.equal(logits(model), want)
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}  # as device maps leave it
    model.save_pretrained(tmp_path)
    check_same(type(model).from_pretrained(tmp_path), quantized())
