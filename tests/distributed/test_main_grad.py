"""Experts over ranks add their gradients to main_grad, each rank those of the experts it holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.layer import MoELayer
from moe_ops.parallel.config import AUTO, HIGH_THROUGHPUT, ParallelConfig
from moe_ops.testing import Tol, assert_close
from tests.distributed.ranks import fake_group, results
from tests.hf import families
from tests.layer.shards import randomize, take_share

TOL = Tol(1e-5, "float32 sums in another order, in parts by rank")
SIZES: dict[str, Any] = {
    "num_experts": 6, "top_k": 3, "hidden_size": 64, "intermediate_size": 32,
}  # fmt: skip
TOKENS = (5, 0, 3)  # of each rank


def give(model: torch.nn.Module) -> list[Any]:
    weights: list[Any] = moe_ops.accumulate_into_main_grad(model)
    for w in weights:
        w.main_grad = torch.zeros_like(w)
    return weights


def gradients(
    rank: int, world: str, whole: MoELayer, given: tuple[Tensor, ...], asked: dict[str, Any]
) -> tuple[Tensor, ...]:
    config = ParallelConfig.of(dp=3, dp_rank=rank, expert_parallel=True, **asked)
    layer = MoELayer(**SIZES, parallel=config, tokens="own", max_num_tokens=8, group=world)
    take_share(whole, layer)
    x, logits = (t.split(TOKENS)[rank].clone().requires_grad_() for t in given)
    w13, w2 = give(layer)
    with torch.enable_grad():
        layer(x, logits).square().sum().backward()
    assert w13.grad is None and w2.grad is None and x.grad is not None and logits.grad is not None
    return x.grad, logits.grad, w13.main_grad, w2.main_grad


@pytest.mark.parametrize(
    "asked",
    [{}, {"collective": HIGH_THROUGHPUT}, {"collective": AUTO}],
    ids=["gather", "exchange", "auto"],
)
def test_gradients_are_those_of_the_whole_layer(asked: dict[str, Any]) -> None:
    whole, T = randomize(MoELayer(**SIZES)), sum(TOKENS)
    given = [torch.randn(T, n, requires_grad=True) for n in (64, 6)]
    leaves = [*given, whole.w13_weight, whole.w2_weight]
    want = torch.autograd.grad(whole(*given).square().sum(), leaves)
    found = results(3, gradients, whole, tuple(t.detach() for t in given), asked)
    for i, (w, parts) in enumerate(zip(want, zip(*found, strict=True), strict=True)):
        assert_close(torch.cat(parts), w, TOL, f"gradient {i}")


def test_experts_of_transformers_that_are_shared() -> None:
    """Of replicated tokens; those of a rank's own are refused. The other rank sends nothing."""
    made = families.build("qwen3_moe")
    whole, inputs = made.model.float().eval(), families.inputs_for(made, 2, 9, 0)
    with fake_group(2) as group:
        stock = moe_ops.share_experts(copy.deepcopy(whole), group)
        model = copy.deepcopy(stock)
        weights = give(model)
        for each in (stock, model):
            each(**inputs, use_cache=False).logits.square().mean().backward()
        names = {id(p): n for n, p in model.named_parameters()}
        for w in weights:
            wanted = stock.get_parameter(names[id(w)]).grad
            assert w.grad is None and wanted is not None
            assert_close(w.main_grad, wanted, TOL, names[id(w)])
        apart = moe_ops.share_experts(whole, group, tokens="own")
        give(apart)
        with pytest.raises(ValueError, match="exchange tokens by 'gather' do not add to main_grad"):
            apart(**inputs, use_cache=False)
