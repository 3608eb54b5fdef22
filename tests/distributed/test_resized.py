"""Layers whose group of ranks gets larger or smaller: the results stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ops import Layout, experts, sum_ranks
from moe_ops.graphs.addresses import identities, state_of
from moe_ops.layer import MoELayer, Routing, resize_layer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn
from tests.distributed.ranks import processes, results
from tests.distributed.resizing import (
    OWN,
    PARTS,
    SIZES,
    SUMS,
    config_of,
    emptied,
    made,
)
from tests.graphs.recorder import Recorder, runner
from tests.layer.shards import randomize, take_share

CLOSE = Tol(1e-5, "a token's experts are summed in another order")
RANKS = 4
# The groups that hold the layer, one after the other: one rank is left, and joined again.
STEPS: tuple[tuple[int, ...], ...] = ((0, 1), (0, 1, 2, 3), (1, 2, 3), (0, 3), (3,), (2, 3))
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
    "static_replicas": {"redundant_experts": 3, "quant": "float8_e4m3fn:32x32"},
    "nvfp4": {"quant": QuantConfig(weights="nvfp4", inputs="nvfp4", static_inputs=True)},
    "padded": {"hidden_multiple": 48, "internal_gate": True},
    "ordered": {
        "quant": QuantConfig(weights="int4:1x32", ordered_input=True, per_expert_order=True)
    },
}  # fmt: skip


def steps(
    rank: int, world: str, whole: MoELayer, options: dict[str, Any], kind: str, layout: str = ""
) -> None:
    groups = [dist.new_group(list(ranks)) for ranks in STEPS]
    layer, before = None, ()
    for step, (ranks, group) in enumerate(zip(STEPS, groups, strict=True)):
        union = dist.new_group(sorted({*before, *ranks}))
        here, was = rank in ranks, rank in before
        if here or was:
            place = ranks.index(rank) if here else 0
            parallel = config_of(kind, len(ranks), place)
            name = group.group_name if here else ""
            if not was:
                layer = made(options, place, len(ranks), name, kind)
                layer = emptied(layer) if before else layer
            assert layer is not None
            if not before:
                if options.get("redundant_experts"):
                    fill = torch.arange(options["redundant_experts"]) * 2
                    order = torch.cat((fill, torch.arange(10).flip(0)))
                    layer.replicas.update_(ExpertReplicas.of(order, 10))
                take_share(whole, layer)
                layer.prepare_weights(layout)
            else:
                asked = name if kind != PARTS else ""
                given = (parallel, asked) if here else (None, "")
                resize_layer(layer, *given, over=union.group_name, joins=not was)
                assert layer.loads is None or not layer.loads.any()
                assert layer.layout == layout
        if here:
            assert layer is not None
            check(whole, layer, rank, f"step {step}, rank {rank}", group.group_name)
        elif was:
            with pytest.raises(
                NotImplementedError, match="left its group by resize_layer, so that"
            ):
                layer(torch.randn(1, 64), None if layer.gate is not None else torch.randn(1, 10))
        before = ranks


def check(whole: MoELayer, layer: MoELayer, rank: int, where: str, group: str = "") -> None:
    own = layer.tokens == "own"
    g = torch.Generator().manual_seed(rank if own else 0)
    x = torch.randn(5 + rank * own, 64, generator=g)
    logits = None if layer.gate is not None else torch.randn(len(x), layer.num_experts, generator=g)
    got = layer(x, logits)
    if not own and layer.reduce_results is None:
        got = sum_ranks(got, group)
    assert_close(got, whole(x, logits), CLOSE, where)
    for name, t in layer.expert_tensors().items():
        assert t.shape[0] == layer.placement.num_slots, f"{where}: {name}"
    for name, spec in layer._specs.items():
        own_t = getattr(layer, name)
        assert (own_t is None) == (spec is None), name
        assert own_t is None or own_t.shape == spec.shape, f"{where}: {name}"


def whole_of(options: dict[str, Any]) -> MoELayer:
    apart = ("redundant_experts", "balanced", "placement", "hidden_multiple")
    alone = {k: v for k, v in options.items() if k not in apart}
    return randomize(MoELayer(**{**SIZES, **alone}))


@in_turn(
    pytest.mark.parametrize("kind", [OWN, PARTS, SUMS]),
    pytest.mark.parametrize("name", OPTIONS),
)
def test_results_stay_as_ranks_come_and_go(name: str, kind: str) -> None:
    options = OPTIONS[name]
    results(RANKS, steps, whole_of(options), options, kind)


@pytest.mark.parametrize("kind", [OWN, SUMS])
def test_those_that_join_prepare_their_weights_as_the_others(kind: str) -> None:
    def turned(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"w13_EFD": t["w13_EFD"].flip(1), "w13_scale_EFG": t["w13_scale_EFG"].flip(1)}

    options = {"quant": "int4:1x32", "redundant_experts": 2}
    experts.layouts["turned"] = Layout(name="turned", prepare=turned, restore=turned)
    try:
        results(RANKS, steps, whole_of(options), options, kind, "turned")
    finally:
        del experts.layouts["turned"]


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
    layer = made(options, *first)
    if rank < 2:
        own.load_state_dict(shared.state_dict())
        take_share(whole, layer)
    parallel = ParallelConfig.of(dp=RANKS, dp_rank=rank, expert_parallel=True)
    if rank >= 2:
        emptied(layer)
    resize_layer(layer, parallel, every.group_name, over=world, joins=rank >= 2)
    check(whole, layer, rank, f"rank {rank}")


def of_neighbours(rank: int, world: str, whole: MoELayer) -> None:
    """Two ranks that have the same tokens are joined by two others."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, was = pairs[rank // 2].group_name, rank < 2

    def config(dp: int) -> ParallelConfig:
        place = {"tp_rank": rank % 2, "dp_rank": rank // 2 if dp > 1 else 0}
        return ParallelConfig.of(tp=2, dp=dp, **place, expert_parallel=True)

    layer = MoELayer(
        **SIZES, parallel=config(1 if was else 2), tokens="own", group=pair if was else world,
        tp_group=pair, max_num_tokens=8 if was else 16, redundant_experts=2,
    )  # fmt: skip
    if was:
        take_share(whole, layer)
    resize_layer(
        layer, config(2), world, over=world, joins=not was, tp_group=pair, max_num_tokens=16
    )
    g = torch.Generator().manual_seed(rank // 2)
    x, logits = torch.randn(9, 64, generator=g), torch.randn(9, 10, generator=g)
    assert_close(layer(x, logits, rows=9), whole(x, logits), CLOSE, f"rank {rank}")


def test_ranks_with_the_same_tokens_become_more() -> None:
    results(4, of_neighbours, randomize(MoELayer(**SIZES)))


def cast_after(rank: int, world: str, whole: MoELayer) -> Tensor:
    layer = take_share(whole, made({}, 0, 1, "")) if rank == 0 else made({}, 1, 2, world)
    resize_layer(layer, config_of(OWN, 2, rank), world, over=world, joins=rank == 1)
    layer.to(torch.bfloat16)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    layer.reset_parameters()
    layer.load_state_dict(state)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank))
    assert layer(x.bfloat16(), x[:, :10].bfloat16()).dtype == torch.bfloat16
    layer.to(torch.float32)
    got = layer(x, x[:, :10])
    whole.bfloat16().float()
    assert_close(got, whole(x, x[:, :10]), CLOSE)
    return got


def test_a_resized_layer_is_cast_saved_and_reset() -> None:
    """One rank is joined by another; weights in bfloat16 have the values that they were cast to."""
    whole = randomize(MoELayer(**SIZES))
    results(2, cast_after, whole)


def test_what_a_captured_graph_depends_on_changes_though_addresses_come_again() -> None:
    layer = MoELayer(**SIZES, redundant_experts=1)
    before = state_of(layer)
    assert identities(state_of(layer)) == identities(before)
    resize_layer(layer, ParallelConfig(), "", over="")
    resized = [x if isinstance(x, tuple) else was
               for x, was in zip(state_of(layer), before, strict=True)]  # fmt: skip
    assert identities(resized) != identities(before)


def captured(rank: int, world: str, whole: MoELayer) -> None:
    recorder, other = Recorder(), dist.new_group([0, 1])
    layer = take_share(whole, made({"redundant_experts": 1}, rank, 2, world, SUMS))
    run = runner(layer, recorder, buckets=(8,), varying=2)
    g = torch.Generator().manual_seed(0)
    x, logits = torch.randn(5, 64, generator=g), torch.randn(5, 10, generator=g)
    run(x, logits)
    assert_close(run(x, logits), whole(x, logits), CLOSE)
    resize_layer(layer, layer.parallel, other.group_name, over=world)
    run(x, logits)
    assert_close(run(x, logits), whole(x, logits), CLOSE)
    assert recorder.captures == 2
    given = (ParallelConfig(), "") if rank == 0 else (None, "")
    resize_layer(layer, *given, over=world)
    if rank == 0:
        assert_close(run(x, logits), whole(x, logits), CLOSE)
        assert recorder.captures == 3
    else:
        with pytest.raises(NotImplementedError, match="left its group by resize_layer"):
            run(x, logits)


def test_what_was_captured_is_captured_again_or_refused() -> None:
    results(2, captured, randomize(MoELayer(**SIZES)))


def compiled(rank: int, world: str) -> None:
    torch.manual_seed(0)
    whole = randomize(MoELayer(**SIZES))
    layer = take_share(whole, made({}, 0, 1, "")) if rank == 0 else made({}, 1, 2, world)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, logits = torch.randn(5, 64), torch.randn(5, 10)
    if rank == 0:
        assert_close(run(x, logits), whole(x, logits), CLOSE)
    resize_layer(layer, config_of(OWN, 2, rank), world, over=world, joins=rank == 1)
    assert_close(run(x, logits, rows=8), whole(x, logits), CLOSE)
    given = (ParallelConfig(), "") if rank == 1 else (None, "")
    resize_layer(layer, *given, over=world)
    if rank == 1:
        assert_close(run(x, logits), whole(x, logits), CLOSE)
    else:
        with pytest.raises(NotImplementedError, match="left its group"):
            layer(x, logits)


@pytest.mark.every
def test_compiled_code_follows(tmp_path: Path) -> None:
    processes(2, tmp_path, compiled)
