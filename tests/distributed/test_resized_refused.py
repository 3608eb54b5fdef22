"""Layers that cannot change groups: every rank says why, and nothing was moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_ops.layer import MoELayer, resize_layer
from moe_ops.parallel.config import ParallelConfig
from tests.distributed.ranks import threads
from tests.distributed.resizing import OWN, PARTS, SIZES, SUMS, config_of, made
from tests.layer.shards import randomize, take_share


def wrong_place(rank: int, world: str, whole: MoELayer) -> None:
    group = dist.new_group([0, 1])
    layer = take_share(whole, made({}, rank, 2, group.group_name))
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


# What one of two ranks gives, and what both say; the other one gives what is right.
def refused(rank: int, world: str, wrong: dict[str, Any], options: dict[str, Any]) -> None:
    options = dict(options)
    kind = options.pop("kind", OWN)
    layer = made(options, rank, 2, world, kind)
    for t in layer.parameters():
        t.zero_()
    if wrong.get("grad") and rank == 1:
        layer.w2_weight.grad = torch.zeros_like(layer.w2_weight)
    given: dict[str, Any] = {"parallel": config_of(kind, 2, rank), "group": world}
    if rank == 1:
        given |= {k: v for k, v in wrong.items() if k != "grad"}
    before = [t.clone() for t in layer.expert_tensors().values()]
    try:
        resize_layer(layer, over=world, **given)
    finally:
        for t, was in zip(layer.expert_tensors().values(), before, strict=True):
            assert torch.equal(t, was)


LINEAR = nn.Linear(64, 64)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "shards": ({"parallel": ParallelConfig.of(tp=2, tp_rank=1)}, {}, "load a checkpoint into a"),
    "no_config": ({"parallel": 3}, {}, "parallel must be a ParallelConfig or None, got an int: 3"),
    "no_group": ({"group": ""}, {}, "tokens='own' needs group, the group_name of a group"),
    "unknown_group": ({"group": "mine"}, {}, "group='mine' names no process group"),
    "leaves_with_a_group": ({"parallel": None}, {}, "of which one that gives parallel=None"),
    "no_tokens": ({"max_num_tokens": 0}, {}, "max_num_tokens=0 must be at least 1"),
    "no_name": ({"group": None}, {}, "group must be a str, got None"),
    "joins": ({"joins": 1}, {}, "joins must be True or False, got an int: 1"),
    "another": (
        {"joins": True, "parallel": ParallelConfig.of(dp=2, expert_parallel=True)}, {},
        "a layer that joins is made for the new group, ep 0/2 = dp 0/2",
    ),
    "too_many_ranks": (
        {"parallel": ParallelConfig.of(dp=12, dp_rank=1, expert_parallel=True)}, {},
        "has 2 ranks, of which this is 1, but parallel says rank 1 of 12",
    ),
    "tp_group": ({"tp_group": "mine"}, {}, "is for ranks that start with the same tokens"),
    "tp_group_of_all": ({"tp_group": "mine"}, {"kind": PARTS}, "read where ranks exchange tokens"),
    "nothing_to_sum_over": ({"group": ""}, {"kind": SUMS}, "reduce_results needs group, the group"),
    "gradient": ({"grad": True}, {}, "w2_weight has a gradient, which does not move with it"),
    "partial": (
        {}, {"kind": PARTS, "shared_experts": LINEAR}, "shared_reduction='partial' says that each",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_what_one_rank_is_refused_every_rank_raises(
    wrong: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    first, second = threads(2, refused, wrong, options)
    assert text in str(second), second
    if wrong:
        assert "rank 1 of" in str(first) and text in str(first), first


def otherwise(rank: int, world: str, options: dict[str, Any]) -> None:
    layer = made(options if rank else {}, rank, 2, world)
    resize_layer(layer, config_of(OWN, 2, rank), world, over=world)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_experts": 11}, "num_experts (rank 0: 10, rank 1: 11)"),
        ({"redundant_experts": 1}, "P (rank 0: 10, rank 1: 11)"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"quant": "int4:1x32"}, "dtype"),
        ({"bias": True}, "expert_tensors"),
        ({"internal_gate": True}, "other_tensors"),
        ({"hidden_size": 32}, "hidden_size (rank 0: 64, rank 1: 32)"),
    ],
)  # fmt: skip
def test_ranks_of_other_layers_are_named(options: dict[str, Any], name: str) -> None:
    for error in threads(2, otherwise, options):
        assert isinstance(error, RuntimeError)
        assert f"moe_ops.resize_layer: the ranks differ in {name}" in str(error)


def joins_one_that_adds_nothing(rank: int, world: str) -> None:
    layer = made({}, rank, 1 + rank, world if rank else "", SUMS)
    resize_layer(layer, config_of(SUMS, 2, rank), world, over=world, joins=rank == 1)


def test_ranks_that_add_their_parts_otherwise_are_named() -> None:
    """Else one would wait for the others' parts in the next forward."""
    for error in threads(2, joins_one_that_adds_nothing):
        assert isinstance(error, RuntimeError)
        assert "differ in reduce_results (rank 0: None, rank 1: 'a group')" in str(error)


def more_ranks_than_experts(rank: int, world: str) -> None:
    pair = dist.new_group([0, 1])
    sizes = {**SIZES, "num_experts": 2, "top_k": 1}
    config = config_of(OWN, 2, rank) if rank < 2 else config_of(OWN, 3, rank)
    layer = MoELayer(
        **{**sizes, "redundant_experts": rank // 2}, parallel=config, tokens="own",
        group=pair.group_name if rank < 2 else world, max_num_tokens=4,
    )  # fmt: skip
    resize_layer(layer, config_of(OWN, 3, rank), world, over=world, joins=rank == 2)


def test_no_group_has_more_ranks_than_experts() -> None:
    for error in threads(3, more_ranks_than_experts):
        assert isinstance(error, ValueError)
        assert "3 expert parallel ranks, but only 2 experts: a rank would hold none" in str(error)


def test_a_group_of_one_rank_is_left_to_itself() -> None:
    layer = randomize(MoELayer(**SIZES, redundant_experts=2))
    x, logits = torch.randn(3, 64), torch.randn(3, 10)
    want = layer(x, logits)
    resize_layer(layer, ParallelConfig(), "", over="")
    assert torch.equal(layer(x, logits), want)
    with pytest.raises(ValueError, match="a rank that joins needs the ParallelConfig"):
        resize_layer(layer, None, "", over="", joins=True)
    sends = MoELayer(**SIZES, tokens="own", max_num_tokens=8)
    resize_layer(sends, ParallelConfig(), "", over="", max_num_tokens=16)
    assert sends.max_num_tokens == 16, "of a later group"
    with pytest.raises(TypeError, match="layer must be a MoELayer, got"):
        resize_layer(LINEAR, None, "", over="")
    with pytest.raises(ValueError, match=r"over='mine': torch\.distributed has no process group"):
        resize_layer(layer, None, "", over="mine")
    with torch.inference_mode():
        resize_layer(layer, ParallelConfig(), "", over="")
        made_there = MoELayer(**SIZES)
    assert torch.equal(layer(x, logits), want)
    with pytest.raises(ValueError, match=r"w13_weight was made under torch.inference_mode\(\)"):
        resize_layer(made_there, ParallelConfig(), "", over="")
