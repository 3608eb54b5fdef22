"""Prompts of linear layers: what loops runs uncompiled, and what is beside it compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import moe_ops
from moe_ops import compiler
from moe_ops.forward import loops
from moe_ops.forward.loops import around_loops
from moe_ops.forward.regions import call_module
from tests.chosen import those_of
from tests.hf import families
from tests.hf.twins import check
from tests.recompiling import Traced

# Their mixers, and whether these loop over a prompt.
MIXERS = {
    "qwen3_next": ("linear_attn", True),
    "nemotron_h": ("mixer", True),
    "jamba": ("mamba", True),
    "zaya": ("self_attn", False),
    "qwen3_moe": ("self_attn", False),
}


@pytest.mark.parametrize("family", MIXERS)
def test_what_is_beside_a_loop_runs_through_the_region(family: str) -> None:
    name, loop = MIXERS[family]
    model = families.build(family).model
    ran: list[nn.Module] = []

    def region(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ran.append(module)
        return call_module(module, *args, **kwargs)

    around = around_loops(model, region)
    if not loop:
        assert around is region
        return
    layer = model.get_decoder().layers[0]
    x = torch.randn(2, 5, model.config.hidden_size)
    with torch.no_grad():
        takes = {"position_embeddings": None} if family == "qwen3_next" else {}
        want = layer(x, **takes)
        got = around(layer, x, **takes)
    torch.testing.assert_close(got, want)
    mixer = layer.get_submodule(name)
    beside = {m for m in layer.children() if m is not mixer}
    assert set(ran) == beside and beside


def test_functions_of_ours_do_not_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("qwen3_next").model
    layer = model.get_decoder().layers[0]
    assert loops._loops(layer.linear_attn) and not loops._loops(layer.mlp)
    monkeypatch.setattr(loops, "_is_ours", lambda function: True)
    assert not loops._loops(layer.linear_attn)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", those_of(["qwen3_next"], ["qwen3_next", "nemotron_h", "lfm2_moe"])
)
def test_prompts_of_any_length_share_code(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    # Dynamo's graphs are counted, which need no code.
    monkeypatch.setattr(compiler, "Net", Traced)
    model = families.build(family).model
    twin = moe_ops.compile(model)
    check(model, twin, torch.randint(16, 90, (3, 9)))
    counters.clear()
    for rows, length in ((3, 2), (4, 100), (3, 65), (3, 33), (4, 2)):
        check(model, twin, torch.randint(16, 90, (rows, length)))
    assert counters["stats"]["unique_graphs"] == 0
