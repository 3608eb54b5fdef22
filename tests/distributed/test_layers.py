"""Layers of several ranks, each with tokens of its own, give what the whole layer gives."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ops.layer import MoELayer, Routing
from moe_ops.ops import route
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import AUTO, HIGH_THROUGHPUT, LOW_LATENCY, ParallelConfig
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Tol, assert_close
from tests.distributed.ranks import fake_group, results, threads
from tests.layer.shards import randomize, take_share

CLOSE = Tol(1e-5, "a token's experts are summed in another order")
SIZES: dict[str, Any] = {
    "num_experts": 6, "top_k": 3, "hidden_size": 64, "intermediate_size": 32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Sizes of the groups, the tokens that each rank starts with, and how they travel."""

    name: str
    tokens: tuple[int, ...]  # of neighbours with the same ones, once
    asked: dict[str, Any] = field(default_factory=dict)  # of ParallelConfig.of

    @property
    def size(self) -> int:
        return self.asked.get("dp", 1) * self.asked.get("pcp", 1) * self.asked.get("tp", 1)

    def config(self, rank: int) -> ParallelConfig:
        tp, pcp = self.asked.get("tp", 1), self.asked.get("pcp", 1)
        ranks = {
            "tp_rank": rank % tp, "pcp_rank": rank // tp % pcp, "dp_rank": rank // (tp * pcp),
        }  # fmt: skip
        return ParallelConfig.of(**self.asked, **ranks)


EP: dict[str, Any] = {"expert_parallel": True}
DP_EP = Ranks(name="dp_ep", tokens=(5, 0, 3), asked={"dp": 3, **EP})
RANKS = (
    DP_EP,
    Ranks(name="exchange", tokens=(5, 0, 3), asked={"dp": 3, **EP, "collective": HIGH_THROUGHPUT}),
    Ranks(name="auto", tokens=(0, 4), asked={"dp": 2, **EP, "collective": AUTO}),
    Ranks(name="uneven_experts", tokens=(2, 1, 0, 4), asked={"dp": 4, **EP}),
    Ranks(name="none", tokens=(0, 0), asked={"dp": 2, **EP}),
    Ranks(name="sp_ep", tokens=(3, 2), asked={"tp": 2, **EP, "sequence_parallel": True}),
    Ranks(name="sp_tp", tokens=(3, 2), asked={"tp": 2, "sequence_parallel": True}),
    Ranks(name="dp_pcp_tp", tokens=(3, 0, 1, 2), asked={"dp": 2, "pcp": 2}),
    Ranks(name="shards_auto", tokens=(3, 2), asked={"dp": 2, "collective": AUTO}),
    Ranks(name="dp_of_tp_ep", tokens=(5, 2), asked={"dp": 2, "tp": 2, **EP}),
    Ranks(name="tp_ep", tokens=(7,), asked={"tp": 3, **EP}),
    Ranks(
        name="tp_ep_one_token", tokens=(1,), asked={"tp": 2, **EP, "collective": HIGH_THROUGHPUT}
    ),
    Ranks(name="tp_ep_none", tokens=(0,), asked={"tp": 2, **EP}),
    Ranks(name="dp_of_tp_shards", tokens=(5, 2), asked={"dp": 2, "tp": 2}),
)


def groups(config: ParallelConfig) -> dict[str, str]:
    """The groups of a layer by the names of its arguments; every rank makes all of them."""
    found = {"group": dist.group.WORLD.group_name}
    n = config.sharers
    if n > 1:
        for first in range(0, config.size, n):
            made = dist.new_group(list(range(first, first + n)))
            if first <= config.rank < first + n:
                found["tp_group"] = made.group_name
    return found


def run(
    rank: int, world: str, ranks: Ranks, whole: MoELayer, given: tuple[Tensor, ...],
    options: dict[str, Any], rows: int | None,
) -> tuple[Any, Tensor | None]:  # fmt: skip
    """What a rank makes of its tokens, and the loads that it counted."""
    config = ranks.config(rank)
    layer = MoELayer(
        **{**SIZES, **options}, parallel=config, tokens="own", max_num_tokens=8, **groups(config)
    )
    if layer.replicas is not None and options.get("redundant_experts"):
        order = torch.tensor([4, 0, 0, 3, 5, 1, 2, 4])
        layer.replicas.update_(ExpertReplicas.of(order, layer.num_experts))
    take_share(whole, layer)
    mine = [t.split(list(ranks.tokens))[rank // config.sharers] for t in given]
    return layer(*mine, rows=rows), layer.loads


def compare(ranks: Ranks, rows: int | None = None, **options: Any) -> list[Tensor | None]:
    """Hold the ranks' results against the whole layer's. Returns the loads of each."""
    only_ranks = (
        "shared_experts", "shared_reduction", "redundant_experts", "hidden_multiple", "placement",
    )  # fmt: skip
    alone = {k: v for k, v in options.items() if k not in only_ranks}
    if isinstance(options.get("shared_experts"), int):
        alone["shared_experts"] = options["shared_experts"]
    whole = randomize(MoELayer(**{**SIZES, **alone}))
    T = sum(ranks.tokens)
    width = getattr(options.get("routed_input_transform"), "in_features", 64)
    given = (torch.randn(T, width), torch.randn(T, whole.num_experts))
    found = results(ranks.size, run, ranks, whole, given, options, rows)
    sharers = ranks.config(0).sharers
    want = whole(*given).split(list(ranks.tokens))
    module = options.get("shared_experts")
    for rank, (got, _) in enumerate(found):
        add: Any = 0
        if isinstance(module, nn.Module):
            partial = options.get("shared_reduction", "partial") == "partial"
            x = given[0].split(list(ranks.tokens))[rank // sharers]
            add = module(x) * (sharers if partial else 1)
        assert_close(got, want[rank // sharers] + add, CLOSE, f"rank {rank}")
    return [loads for _, loads in found]


@pytest.mark.parametrize("ranks", RANKS, ids=lambda r: r.name)
@torch.no_grad()
def test_each_rank_gets_the_whole_result_of_its_tokens(ranks: Ranks) -> None:
    compare(ranks, bias=True)


TP_EP = next(r for r in RANKS if r.name == "dp_of_tp_ep")
SHARDS = next(r for r in RANKS if r.name == "dp_of_tp_shards")
TP_EP_ONE = Ranks(
    name="tp_ep_exchange", tokens=(5,), asked={"tp": 2, **EP, "collective": HIGH_THROUGHPUT}
)
GROUPS = Routing(n_group=3, topk_group=2)
LINEAR = nn.Linear(64, 64)
FP8 = QuantConfig(weights="float8_e4m3fn:32x32", inputs="float8_e4m3fn:1x32")
ORDERED = QuantConfig(weights="int4:1x32", ordered_input=True, per_expert_order=True)
OPTIONS: dict[str, tuple[Ranks, dict[str, Any]]] = {
    "fused_shared": (RANKS[3], {"shared_experts": 2}),
    "fused_shared_exchange": (RANKS[1], {"shared_experts": 1}),
    "fused_shared_shards": (SHARDS, {"shared_experts": 2}),
    "shared_at_home": (DP_EP, {"shared_experts": LINEAR, "shared_reduction": "replicated"}),
    "shared_of_tp": (TP_EP, {"shared_experts": LINEAR}),
    "shared_whole_of_tp": (TP_EP, {"shared_experts": LINEAR, "shared_reduction": "replicated"}),
    "redundant": (RANKS[2], {"redundant_experts": 2, "balanced": True}),
    "weight_on_input": (DP_EP, {"top_k": 1, "routing": Routing(weight_on_input=True)}),
    "int4": (DP_EP, {"quant": "int4:1x32"}),
    "fp8": (RANKS[1], {"quant": FP8}),
    "ordered_columns": (DP_EP, {"quant": ORDERED}),
    "ordered_columns_auto": (RANKS[2], {"quant": ORDERED}),
    "padded": (DP_EP, {"hidden_multiple": 48}),
    "fewer_rows": (DP_EP, {"rows": 5}),
    "round_robin": (TP_EP_ONE, {"placement": "round_robin", "routing": GROUPS}),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "options"), OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_options_mean_what_they_mean_on_one_rank(ranks: Ranks, options: dict[str, Any]) -> None:
    compare(ranks, **options)


@torch.no_grad()
def test_each_rank_counts_its_own_tokens() -> None:
    loads = compare(DP_EP, balanced=True)
    assert [int(t.sum()) for t in loads] == [3 * tokens for tokens in DP_EP.tokens]


def gradients(
    rank: int, world: str, whole: MoELayer, given: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    config = DP_EP.config(rank)
    layer = MoELayer(**SIZES, parallel=config, tokens="own", max_num_tokens=8, group=world)
    take_share(whole, layer)
    x, logits = (t.split(list(DP_EP.tokens))[rank].clone().requires_grad_() for t in given)
    with torch.enable_grad():
        loss = layer(x, logits).square().sum()
        return torch.autograd.grad(loss, [x, logits, layer.w13_weight, layer.w2_weight])


def test_gradients_are_those_of_the_whole_layer() -> None:
    whole, T = randomize(MoELayer(**SIZES)), sum(DP_EP.tokens)
    given = [torch.randn(T, n, requires_grad=True) for n in (64, 6)]
    leaves = [*given, whole.w13_weight, whole.w2_weight]
    want = torch.autograd.grad(whole(*given).square().sum(), leaves)
    found = results(3, gradients, whole, tuple(t.detach() for t in given))
    for i, (w, parts) in enumerate(zip(want, zip(*found, strict=True), strict=True)):
        assert_close(torch.cat(parts), w, Tol(1e-5, "sums in another order"), f"gradient {i}")


def too_many(rank: int, world: str, rows: int) -> Tensor:
    layer = MoELayer(
        **SIZES, parallel=DP_EP.config(rank), tokens="own", max_num_tokens=4, group=world
    )
    return layer(torch.randn(1 + 2 * rank, 64), torch.randn(1 + 2 * rank, 6), rows=rows)


@pytest.mark.parametrize("rows", [4, 2])
def test_more_tokens_than_agreed_raise_on_every_rank(rows: int) -> None:
    who = "rank 2 has 5" if rows == 4 else "rank 1 has 3, rank 2 has 5"
    for error in threads(3, too_many, rows):
        assert isinstance(error, ValueError) and who in str(error)


def of_sharers(rank: int, world: str) -> Tensor:
    config = ParallelConfig.of(tp=2, tp_rank=rank, **EP)
    layer = MoELayer(**SIZES, parallel=config, tokens="own", max_num_tokens=8, **groups(config))
    return layer(torch.randn(9, 64), torch.randn(9, 6), rows=8)


def test_sharers_agree_on_rows_of_a_share() -> None:
    for error in threads(2, of_sharers):
        assert isinstance(error, ValueError)
        assert "the agreed rows=4: rank 0 has 5, rank 1 has 5" in str(error)


def first_choice(rank: int, world: str) -> int:
    config = ParallelConfig.of(dp=2, dp_rank=rank, **EP)
    layer = MoELayer(
        1, 1, 64, 32, parallel=config, tokens="own", group=world, max_num_tokens=8,
        redundant_experts=1, balanced=True,
    )  # fmt: skip
    return int(layer.route(torch.zeros(1, 64), torch.zeros(1, 1))[1])


def test_each_rank_begins_with_another_replica() -> None:
    assert results(2, first_choice) == [0, 1]


def test_a_compiled_layer_sends_its_tokens_in_one_graph() -> None:
    torch.compiler.reset()
    with fake_group(64) as group, torch.no_grad():
        layer = MoELayer(
            64, 3, 64, 32, parallel=ParallelConfig.of(dp=64, **EP), tokens="own", group=group,
            max_num_tokens=16, internal_gate=True, device="meta",
        )  # fmt: skip
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for T in (5, 3):
            assert compiled(torch.empty(T, 64, device="meta"), rows=8).shape == (T, 64)


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_ranks_compare_is_in_the_graph(dynamic: bool | None) -> None:
    """Of experts with an order of columns each, whose tokens are dispatched by an op of its own."""
    found = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.extend(n for n in graph.graph.nodes if "dispatch_tokens" in str(n.target))
        return lambda *_: (torch.empty(5, 64),)

    torch.compiler.reset()
    with fake_group(4) as group, torch.no_grad():
        layer = MoELayer(
            4, 3, 64, 32, parallel=ParallelConfig.of(dp=4, **EP), tokens="own", group=group,
            max_num_tokens=16, internal_gate=True,
            activation=Activation(kind="silu", limit=math.inf),
            quant=QuantConfig(weights="int4:1x32", ordered_input=True, per_expert_order=True),
        )  # fmt: skip
        torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=keep)(torch.empty(5, 64))
    given = (*found[0].args, *found[0].kwargs.values())
    said = [json.loads(text) for text in given if "kind" in str(text)]
    assert said[0]["limit"] == math.inf and said[0]["w_format"] == "int4:1x32"


TWO = ParallelConfig.of(dp=2, **EP)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no_group": ({"group": ""}, "tokens='own' needs group, the group_name of a group"),
    "no_such_group": ({"group": "mine"}, "group='mine' names no process group"),
    "no_most": ({"max_num_tokens": None}, "tokens='own' needs max_num_tokens, the most"),
    "another_size": (
        {"parallel": ParallelConfig.of(dp=3, **EP)}, "has 2 ranks, of which this is 0, but parall",
    ),
    "another_rank": (
        {"parallel": ParallelConfig.of(dp=2, dp_rank=1, **EP)}, "but parallel says rank 1 of 2",
    ),
    "no_tp_group": (
        {"parallel": ParallelConfig.of(tp=2, **EP)}, "tokens='own' needs tp_group, the group_name",
    ),
    "tp_group_of_none": ({"tp_group": "mine"}, "is for ranks that start with the same tokens"),
    "reduced": ({"reduce_results": torch.clone}, "leave out reduce_results, which would add"),
    "partial": ({"shared_experts": nn.Linear(64, 64)}, "give shared experts that are whole on"),
    "dynamic": (
        {"quant": QuantConfig(weights="float8_e4m3fn:tensor", inputs="float8_e4m3fn:tensor")},
        "takes one scale from all tokens",
    ),
    "of_replicated": ({"tokens": "replicated"}, "group, max_num_tokens is read where ranks exch"),
    "unknown": ({"tokens": "all"}, "tokens='all' is unknown; choose one of replicated, own"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_the_ranks_is_refused(options: dict[str, Any], text: str) -> None:
    with fake_group(2) as group:
        right = {**SIZES, "parallel": TWO, "tokens": "own", "group": group, "max_num_tokens": 8}
        assert "ep 0/2 = dp 0/2, allgather_reducescatter, each with up to 8" in str(
            MoELayer(**right)
        )
        with pytest.raises(ValueError, match=text):
            MoELayer(**{**right, **options})


def test_push_is_refused_without_gpus() -> None:
    config = ParallelConfig.of(dp=2, **EP, collective=LOW_LATENCY)
    reason = "collective='push' needs a tensor on cuda, got cpu; take 'gather' instead"
    with fake_group(2) as group:
        layer = MoELayer(**SIZES, parallel=config, tokens="own", group=group, max_num_tokens=8)
        with pytest.raises(NotImplementedError, match=reason):
            layer(torch.randn(3, 64), torch.randn(3, 6))


@torch.no_grad()
def test_one_rank_needs_no_group() -> None:
    layer = randomize(MoELayer(**SIZES, tokens="own"))
    x, logits = torch.randn(3, 64), torch.randn(3, 6)
    weights, ids = route(logits, 3)
    assert torch.equal(layer(x, logits, rows=3), layer.run_experts(x, weights, ids))
