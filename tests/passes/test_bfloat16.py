"""Whole models in bfloat16: compiled with our passes, and compiled as they are.

Both round at other places, and where two experts score nearly the same that flips the choice: the
token, and all that attend to it, are then computed from other weights. Compared are the tokens up
to which every choice is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.passes.inductor.compiled import pipeline_of
from moe_ops.testing import BF16, TOL, assert_close
from tests.hf import families

# One family for each kind of router, and what its experts run on.
FAMILIES = {
    "qwen3_moe": "cpu",  # softmax, renormalised
    "deepseek_v2": "cpu",  # softmax, not renormalised
    "gpt_oss": "aten",  # top-k, then softmax; the CPU kernel does not take its transposed weights
    "deepseek_v3": "cpu",  # sigmoid with a bias for the choice, in groups
    "minimax_m2": "cpu",  # sigmoid with a bias for the choice
}
SHAPE = (16, 6)  # sequences, tokens


class Watched(nn.Module):
    """A model that also returns the experts that each of its layers chose: [B, S, K]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.chosen: list[Tensor] = []  # of one call, also of a copy of this module
        for experts in families.experts(model).values():
            experts.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.chosen.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    def forward(self, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        self.chosen.clear()
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        return logits, [ids_TK.reshape(*input_ids.shape, -1) for ids_TK in self.chosen]


def same_so_far(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """Whether a token and those before it in its sequence chose alike in every layer: [B, S]."""
    pairs = zip(ours, theirs, strict=True)
    same = [(a.sort(-1).values == b.sort(-1).values).all(-1) for a, b in pairs]
    return torch.stack(same).all(0).cumprod(1).bool()


@pytest.mark.slow
@pytest.mark.every  # tests/layer compiles a layer in bfloat16
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_model_gives_what_it_gives_compiled_as_it_is(family: str) -> None:
    torch._dynamo.reset()
    tiny = families.build(family)
    input_ids = families.inputs_for(tiny, *SHAPE, seed=1)["input_ids"]
    model = Watched(tiny.model.to(BF16))
    want, theirs = torch.compile(model, fullgraph=True, dynamic=False)(input_ids)

    torch._dynamo.reset()
    thresholds = ((None, FAMILIES[family]),)
    twin = moe_ops.compile(model, fullgraph=True, dynamic=False, thresholds=thresholds)
    with torch._inductor.config.patch(fx_graph_cache=False):
        got, ours = twin(input_ids)
    (run,) = pipeline_of(twin).runs
    rewrites = {done.name: done.rewrites for done in run.passes}
    layers = len(families.experts(model))
    assert (rewrites["lift_router"], rewrites["fuse_experts"]) == (layers, layers)

    same = same_so_far(ours, theirs)
    assert float(same.float().mean()) > 0.5
    assert_close(got[same], want[same], TOL["model", BF16], family)


def test_a_token_counts_until_another_choice_before_it() -> None:
    layer_BSK = torch.tensor([[[0, 1], [2, 3], [1, 0]], [[0, 1], [2, 3], [1, 0]]])
    same, other = layer_BSK.flip(-1), layer_BSK.clone()
    other[1, 1, 0] = 4
    assert same_so_far([layer_BSK, layer_BSK], [same, layer_BSK]).all()
    found = same_so_far([layer_BSK, layer_BSK], [layer_BSK, other])
    assert found.tolist() == [[True, True, True], [True, False, False]]
