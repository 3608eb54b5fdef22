"""Layers whose group of ranks gets larger or smaller: the results stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_ops.layer import MoELayer, Routing, resize_layer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.testing import Tol, assert_close
from tests.distributed.ranks import results, threads
from tests.layer.shards import randomize, take_share

CLOSE = Tol(1e-5, "a token's experts are summed in another order")
SIZES: dict[str, Any] = {
    "num_experts": 10, "top_k": 3, "hidden_size": 64, "intermediate_size": 32,
    "dtype": torch.float32,
}  # fmt: skip
RANKS = 4
# The groups that hold the layer, one after the other.
STEPS: tuple[tuple[int, ...], ...] = ((0, 1), (0, 1, 2, 3), (1, 2, 3), (0, 3), (3,))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"bias": True},
    "int4": {"quant": "int4:1x32"},
    "mxfp8": {"quant": "mxfp8"},
    "fused_shared": {"shared_experts": 1, "redundant_experts": 2},
    "round_robin": {
        "num_experts": 12, "placement": "round_robin",
        "routing": Routing(n_group=3, topk_group=2, correction_bias=True),
    },
    "balanced": {"balanced": True, "redundant_experts": 3, "internal_gate": True},
}  # fmt: skip


def made(whole: MoELayer, options: dict[str, Any], rank: int, ranks: int, group: str) -> MoELayer:
    config = ParallelConfig.of(dp=ranks, dp_rank=rank, expert_parallel=True)
    more = {"parallel": config, "tokens": "own", "group": group, "max_num_tokens": 16}
    layer = MoELayer(**{**SIZES, **options}, **more)
    for t in (*layer.parameters(), *layer.buffers()):
        if t.is_floating_point() and t.dtype.itemsize > 1:
            t.fill_(float("nan"))  # what joins means nothing
    return layer


def steps(rank: int, world: str, whole: MoELayer, options: dict[str, Any]) -> None:
    groups = [dist.new_group(list(ranks)) for ranks in STEPS]
    layer, before = None, ()
    for step, (ranks, group) in enumerate(zip(STEPS, groups, strict=True)):
        union = dist.new_group(sorted({*before, *ranks}))
        here, was = rank in ranks, rank in before
        if here or was:
            place = ranks.index(rank) if here else 0
            parallel = ParallelConfig.of(dp=len(ranks), dp_rank=place, expert_parallel=True)
            name = group.group_name if here else ""
            if not was:
                layer = made(whole, options, place, len(ranks), name)
            assert layer is not None
            if not before:
                take_share(whole, layer)
            else:
                given = (parallel, name) if here else (None, "")
                resize_layer(layer, *given, over=union.group_name, joins=not was)
                assert layer.loads is None or not layer.loads.any()
        if here:
            assert layer is not None
            check(whole, layer, rank, f"step {step}, rank {rank}")
        before = ranks


def check(whole: MoELayer, layer: MoELayer, rank: int, where: str) -> None:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + rank, 64, generator=g)
    logits = None if layer.gate is not None else torch.randn(len(x), layer.num_experts, generator=g)
    assert_close(layer(x, logits), whole(x, logits), CLOSE, where)
    for name, t in layer.expert_tensors().items():
        assert t.shape[0] == layer.placement.num_slots, f"{where}: {name}"
    for name, spec in layer._specs.items():
        own = getattr(layer, name)
        assert (own is None) == (spec is None), name
        assert own is None or own.shape == spec.shape, f"{where}: {name}"


@pytest.mark.parametrize("name", OPTIONS)
def test_results_stay_as_ranks_come_and_go(name: str) -> None:
    options = OPTIONS[name]
    apart = ("redundant_experts", "balanced", "placement")
    whole = MoELayer(**{**SIZES, **{k: v for k, v in options.items() if k not in apart}})
    results(RANKS, steps, randomize(whole), options)


def test_a_module_of_shared_experts_comes_with_the_layer() -> None:
    shared = nn.Linear(64, 64)
    whole = randomize(MoELayer(**SIZES, shared_experts=shared))
    results(RANKS, with_shared, whole, shared)


def with_shared(rank: int, world: str, whole: MoELayer, shared: nn.Linear) -> None:
    pair, every = dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])
    own = nn.Linear(64, 64)
    if rank < 2:
        own.load_state_dict(shared.state_dict())
    options = {"shared_experts": own, "shared_reduction": "replicated"}
    first = (rank, 2, pair.group_name) if rank < 2 else (rank, RANKS, every.group_name)
    layer = made(whole, options, *first)
    if rank < 2:
        own.load_state_dict(shared.state_dict())
        take_share(whole, layer)
    parallel = ParallelConfig.of(dp=RANKS, dp_rank=rank, expert_parallel=True)
    resize_layer(layer, parallel, every.group_name, over=world, joins=rank >= 2)
    check(whole, layer, rank, f"rank {rank}")


def wrong_place(rank: int, world: str, whole: MoELayer) -> None:
    group = dist.new_group([0, 1])
    layer = take_share(whole, made(whole, {}, rank, 2, group.group_name))
    before = {name: t.clone() for name, t in layer.expert_tensors().items()}
    try:
        # The second rank thinks that it leaves, while the first one goes on with two ranks.
        given = (layer.parallel, world) if rank == 0 else (None, "")
        resize_layer(layer, *given, over=world)
    finally:
        for name, t in layer.expert_tensors().items():
            assert torch.equal(t, before[name]), name


def test_ranks_that_do_not_fit_together_are_named() -> None:
    whole = randomize(MoELayer(**SIZES))
    said = "those of one new group: rank 0: 0 of 2, rank 1: -; every"
    for error in threads(2, wrong_place, whole):
        assert isinstance(error, RuntimeError)
        assert said in str(error)


def test_layers_that_cannot_be_resized_say_why() -> None:
    config = ParallelConfig.of(dp=2, expert_parallel=True)
    replicated = MoELayer(**SIZES, parallel=config, tokens="replicated")
    with pytest.raises(ValueError, match="only a layer whose ranks exchange tokens of their own"):
        resize_layer(replicated, config, "", over="")
    with pytest.raises(ValueError, match="a rank that joins needs the ParallelConfig"):
        resize_layer(replicated, None, "", over="", joins=True)
    shards = ParallelConfig.of(dp=2)
    with pytest.raises(ValueError, match=r"experts can move .* load a checkpoint into a new"):
        resize_layer(replicated, shards, "", over="")
