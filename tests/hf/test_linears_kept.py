"""Linear layers that keep their weight, as something beside it would be lost; and weights that are
no numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import moe_ops
from tests.hf import families
from tests.hf.coded_linears import coded
from tests.hf.test_quantize import qwen


def test_copies_that_peft_trains_and_what_they_stand_for_stay() -> None:
    peft = pytest.importorskip("peft")
    model = qwen()
    config = peft.LoraConfig(target_modules=["v_proj"], modules_to_save=["q_proj"], r=4)
    trained = peft.get_peft_model(model, config)
    moe_ops.quantize_model(model, None, linear_format="int8:row", progress=False)
    assert not any("q_proj" in name for name in coded(model)) and len(coded(model)) == 4
    copies = [n for n, p in trained.named_parameters() if "q_proj" in n and p.requires_grad]
    assert len(copies) == 2


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook,
    ],
)  # fmt: skip
def test_layers_with_hooks_stay(register: Any) -> None:
    model = qwen()
    register(model.model.layers[0].self_attn.q_proj, lambda *args: None)
    report = moe_ops.quantize_model(model, None, linear_format="int8:row", progress=False)
    assert report.linears_kept == {"model.layers.0.self_attn.q_proj": "has hooks"}


def test_what_a_model_keeps_in_float32_stays() -> None:
    model = qwen()
    model._keep_in_fp32_modules.add("self_attn.q_proj")
    model._keep_in_fp32_modules_strict.add("lm_head")
    report = moe_ops.quantize_model(
        model, None, linear_format="int8:row", head_format="int8:row", progress=False
    )
    kept = {f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)} | {"lm_head"}
    assert report.linears_kept == dict.fromkeys(kept, "is among what its model keeps in float32")
    assert len(coded(model)) == 6


def test_the_report_shows_a_weight_that_is_no_number() -> None:
    model = qwen()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[3, 5] = float("nan")
    report = moe_ops.quantize_model(model, None, linear_format="int8:row", progress=False)
    assert report.linears is not None and math.isnan(report.linears.error)
    assert report.linears.worst == "model.layers.0.self_attn.k_proj"


# Indexers of sparse attention, and what of them published checkpoints in float8 hold codes of.
INDEXERS = {
    "deepseek_v32": {"wq_b", "wk"},
    "glm_moe_dsa": {"wq_b", "wk"},
    "hy_v4": {"wq_b", "wk"},
    "deepseek_v4": {"q_b_proj"},
}


@pytest.mark.parametrize("family", [f for f in INDEXERS if f in families.discover()])
def test_what_weighs_the_heads_of_an_indexer_stays(family: str) -> None:
    model = families.build(family).model
    model._keep_in_fp32_modules = [n for n in model._keep_in_fp32_modules or () if "weig" not in n]
    report = moe_ops.quantize_model(model, None, linear_format="int8:row", progress=False)
    names = [n for n in coded(model) if "indexer" in n]
    assert {n.rpartition(".")[2] for n in names} == INDEXERS[family]
    kept = {n: why for n, why in report.linears_kept.items() if n.endswith("weights_proj")}
    assert kept and all("indexer" in n for n in kept)
    assert set(kept.values()) == {
        "weighs the heads of an indexer, which published checkpoints keep in 16 bits"
    }
