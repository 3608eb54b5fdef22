"""Batch invariant calls over ranks: a token has the bits that one process gives it, alone, whatever
the number of ranks, how tokens travel, who serves an expert, and what others send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_ops
from moe_ops.layer import MoELayer, Routing, rebalance_layers
from moe_ops.parallel.config import AUTO, HIGH_THROUGHPUT, ParallelConfig
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import TENSOR
from moe_ops.registry.invariance import invariant
from tests.chosen import in_turn, those_of
from tests.distributed.ranks import processes, results, threads
from tests.layer.shards import randomize, take_share
from tests.layer.test_layer_split import FORMATS

SIZES: dict[str, Any] = {
    "num_experts": 8, "top_k": 3, "hidden_size": 64, "intermediate_size": 96,
}  # fmt: skip
EP: dict[str, Any] = {"expert_parallel": True}
BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Sizes of the groups, the tokens that each rank starts with, and how they travel."""

    name: str
    tokens: tuple[int, ...]  # of neighbours with the same ones, once
    asked: dict[str, Any] = field(default_factory=dict)  # of ParallelConfig.of
    replicated: bool = False

    @property
    def size(self) -> int:
        return self.asked.get("dp", 1) * self.asked.get("tp", 1)

    def config(self, rank: int) -> ParallelConfig:
        tp = self.asked.get("tp", 1)
        return ParallelConfig.of(**self.asked, **EP, tp_rank=rank % tp, dp_rank=rank // tp)

    def layer(self, rank: int, world: str, whole: MoELayer, options: dict[str, Any]) -> MoELayer:
        """A rank's share; every rank makes all groups."""
        config = self.config(rank)
        more: dict[str, Any] = {"tokens": "replicated", "reduce_results": world}
        if not self.replicated:
            more = {"tokens": "own", "group": world, "max_num_tokens": 4}
        if config.sharers > 1 and not self.replicated:
            n = config.sharers
            for first in range(0, config.size, n):
                made = dist.new_group(list(range(first, first + n)))
                if first <= rank < first + n:
                    more["tp_group"] = made.group_name
        layer = MoELayer(**{**SIZES, **options}, parallel=config, **more)
        return take_share(whole, layer)

    def mine(self, rank: int, t: Tensor) -> Tensor:
        place = 0 if self.replicated else rank // self.config(rank).sharers
        return t.split(list(self.tokens))[place]


GATHERED = Ranks(name="gather", tokens=(7, 0, 5), asked={"dp": 3})
EXCHANGED = Ranks(name="exchange", tokens=(7, 0, 5), asked={"dp": 3, "collective": HIGH_THROUGHPUT})
REPLICATED = Ranks(name="replicated", tokens=(9,), asked={"tp": 3}, replicated=True)
RANKS = (
    GATHERED,
    EXCHANGED,
    REPLICATED,
    Ranks(name="auto", tokens=(3, 4), asked={"dp": 2, "collective": AUTO}),
    Ranks(name="four", tokens=(2, 1, 0, 4), asked={"dp": 4}),
    Ranks(name="none", tokens=(0, 0), asked={"dp": 2}),
    Ranks(name="neighbours", tokens=(5, 2), asked={"dp": 2, "tp": 2}),
    Ranks(name="sequences", tokens=(3, 2), asked={"tp": 2, "sequence_parallel": True}),
)


def given(T: int, dtype: torch.dtype = torch.float32, width: int = 64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(T)
    return torch.randn(T, width, generator=g).to(dtype), torch.randn(T, 8, generator=g)


def each_alone(layer: Callable[..., Any], x: Tensor, logits: Tensor) -> Tensor:
    """What a layer of one process makes of tokens that come alone."""
    with torch.no_grad(), invariant():
        made = [layer(x[t : t + 1], logits[t : t + 1]) for t in range(len(x))]
    return torch.cat([torch.empty_like(x[:0]), *made])


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, which those of one NaN are."""
    codes = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return a.shape == b.shape and torch.equal(a.view(codes), b.view(codes))


def run(
    rank: int, world: str, ranks: Ranks, whole: MoELayer, options: dict[str, Any],
    tokens: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What a rank makes of its tokens in the mode, and without it."""
    layer = ranks.layer(rank, world, whole, options)
    if layer.replicas is not None and options.get("redundant_experts"):
        order = torch.tensor([4, 0, 0, 3, 5, 1, 2, 4, 6, 7])
        layer.replicas.update_(ExpertReplicas.of(order, layer.num_experts))
        take_share(whole, layer)
    mine = [ranks.mine(rank, t) for t in tokens]
    with invariant():
        found = layer(*mine)
    return found, layer(*mine)


OF_RANKS = ("redundant_experts", "balanced", "placement", "shared_reduction")


def whole_of(options: dict[str, Any]) -> MoELayer:
    """The layer of one process."""
    alone = {k: v for k, v in options.items() if k not in OF_RANKS}
    return randomize(MoELayer(**{**SIZES, **alone}))


def compare(ranks: Ranks, options: dict[str, Any]) -> bool:
    """Hold the bits of all ranks against those of one process; whether the mode made a difference
    anywhere."""
    whole = whole_of(options)
    tokens = given(sum(ranks.tokens), options.get("dtype", torch.float32), whole.sizes.hidden_size)
    want = each_alone(whole, *tokens)
    found = results(ranks.size, run, ranks, whole, options, tokens)
    for rank, (got, _) in enumerate(found):
        assert same(got, ranks.mine(rank, want)), f"rank {rank} of {ranks.name}"
    return any(not same(*pair) for pair in found)


@pytest.mark.parametrize("ranks", RANKS, ids=lambda r: r.name)
def test_bits_are_those_of_one_process(ranks: Ranks) -> None:
    assert compare(ranks, {"bias": True}) or not any(ranks.tokens), "the mode changes nothing"


FP8 = QuantConfig(weights="float8_e4m3fn:row", inputs="float8_e4m3fn:row")
ORDERED = QuantConfig(weights="int4:1x32", ordered_input=True, per_expert_order=True)
GROUPS = Routing(n_group=4, topk_group=3)
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": BF16},
    "weights_in_bfloat16": {"dtype": BF16, "routing": Routing(weights_dtype="bfloat16")},
    "fp8": {"dtype": BF16, "quant": FP8},
    "ordered_by_expert": {"quant": ORDERED},
    "fused_shared": {"shared_experts": 2},
    "replicas": {"redundant_experts": 2, "balanced": True},
    "round_robin": {"placement": "round_robin", "routing": GROUPS, "redundant_experts": 0},
}  # fmt: skip


@in_turn(
    pytest.mark.parametrize("ranks", [GATHERED, EXCHANGED, REPLICATED], ids=lambda r: r.name),
    pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS),
)
def test_options_mean_the_bits_of_one_process(options: dict[str, Any], ranks: Ranks) -> None:
    compare(ranks, options)


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "top_k": 2, "dtype": BF16}
# One scale of all tokens is of who is there.
APART = [q for q in FORMATS if q.static_inputs or not q.inputs or q.input_format.group != TENSOR]


@in_turn(
    pytest.mark.parametrize("ranks", [GATHERED, EXCHANGED, REPLICATED], ids=lambda r: r.name),
    pytest.mark.parametrize("quant", those_of(APART[::8], APART), ids=str),
)
def test_formats_have_the_bits_of_one_process(quant: QuantConfig, ranks: Ranks) -> None:
    """Or none, of those that one process refuses here."""
    options = {**WIDE, "quant": quant}
    try:
        each_alone(whole_of(options), *given(1, BF16, 128))
    except NotImplementedError:
        tokens = given(sum(ranks.tokens), BF16, 128)
        for error in threads(ranks.size, run, ranks, whole_of(options), options, tokens):
            assert isinstance(error, NotImplementedError) and "the same bits" in str(error)
        return
    compare(ranks, options)


def beside(rank: int, world: str, ranks: Ranks, whole: MoELayer, tokens: Any) -> list[Tensor]:
    """What the first rank's tokens get beside others, whose values are these, in turn."""
    layer, found = ranks.layer(rank, world, whole, {}), []
    for value in (0.0, 1e30, float("inf"), float("nan")):
        x, logits = (ranks.mine(rank, t) for t in tokens)
        with invariant():
            found.append(layer(x if rank == 0 else torch.full_like(x, value), logits))
    return found


@pytest.mark.parametrize("ranks", [GATHERED, EXCHANGED], ids=lambda r: r.name)
def test_values_of_others_change_no_bit(ranks: Ranks) -> None:
    whole, tokens = whole_of({}), given(sum(ranks.tokens))
    want = ranks.mine(0, each_alone(whole, *tokens))
    for got in results(ranks.size, beside, ranks, whole, tokens)[0]:
        assert same(got, want)


def moved(rank: int, world: str, ranks: Ranks, whole: MoELayer, tokens: Any) -> list[Tensor]:
    """What a rank makes of its tokens before and after experts change ranks."""
    layer = ranks.layer(rank, world, whole, {"balanced": True, "redundant_experts": 2})
    x, logits = (ranks.mine(rank, t) for t in tokens)
    found = []
    for _ in range(3):
        with invariant():
            found.append(layer(x, logits))
        rebalance_layers([layer], world)
    return found


@pytest.mark.parametrize("ranks", [EXCHANGED, REPLICATED], ids=lambda r: r.name)
def test_bits_stay_as_experts_change_ranks(ranks: Ranks) -> None:
    whole, (x, logits) = whole_of({}), given(sum(ranks.tokens))
    tokens = (x, logits - 2 * torch.arange(8))  # which prefer a few experts
    want = each_alone(whole, *tokens)
    for rank, found in enumerate(results(ranks.size, moved, ranks, whole, tokens)):
        assert all(same(got, ranks.mine(rank, want)) for got in found)


def refused(rank: int, world: str, ranks: Ranks, options: dict[str, Any], config: Any) -> None:
    """A call of a layer that raises in the mode alone."""
    more = {"tokens": "replicated", "reduce_results": world}
    if not ranks.replicated:
        more = {"tokens": "own", "group": world, "max_num_tokens": 4}
    asked = {**ranks.asked, **EP, **config}
    tp = asked.get("tp", 1)
    parallel = ParallelConfig.of(**asked, tp_rank=rank % tp, dp_rank=rank // tp)
    layer = MoELayer(**{**SIZES, **more, **options}, parallel=parallel)
    layer(*given(2))
    with invariant():
        layer(*given(2))


SHARDS: dict[str, Any] = {"expert_parallel": False, "collective": AUTO}
MODULE = nn.Linear(64, 64)
REFUSED: dict[str, tuple[Ranks, dict[str, Any], dict[str, Any], str]] = {
    "shards": (GATHERED, {}, SHARDS, "multiplies a shard of every expert, and their sum over"),
    "shards_of_all": (REPLICATED, {}, SHARDS, "give each rank whole experts: expert_parallel=True"),
    "parts": (REPLICATED, {"reduce_results": None}, {}, "a sum that the caller makes; give reduce"),
    "function": (REPLICATED, {"reduce_results": torch.neg}, {}, "adds parts in an order of its"),
    "shared": (REPLICATED, {"shared_experts": MODULE}, {}, "return a part of a sum over the ranks"),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "options", "config", "said"), REFUSED.values(), ids=REFUSED)
def test_layers_of_sums_over_ranks_say_why_not(
    ranks: Ranks, options: dict[str, Any], config: dict[str, Any], said: str
) -> None:
    for error in threads(ranks.size, refused, ranks, options, config):
        assert isinstance(error, NotImplementedError), error
        assert str(error).startswith("this MoELayer is not batch invariant: ")
        assert said in str(error)


@pytest.mark.parametrize("ranks", [GATHERED, EXCHANGED, REPLICATED], ids=lambda r: r.name)
@pytest.mark.parametrize("quant", [None, ORDERED], ids=["plain", "ordered_by_expert"])
def test_layers_ask_for_it_themselves(ranks: Ranks, quant: QuantConfig | None) -> None:
    options = {"quant": quant}
    whole, tokens = whole_of(options), given(sum(ranks.tokens))
    want = each_alone(whole, *tokens)
    found = results(ranks.size, run, ranks, whole, {**options, "batch_invariant": True}, tokens)
    for rank, (_, usual) in enumerate(found):
        assert same(usual, ranks.mine(rank, want))


def compiled(rank: int, world: str, ranks: Ranks, quant: QuantConfig | None) -> None:
    """Compiled layers, as options of the graph or of the layer ask for it."""
    whole, tokens = whole_of({"quant": quant}), given(sum(ranks.tokens))
    want = ranks.mine(rank, each_alone(whole, *tokens))
    mine = [ranks.mine(rank, t) for t in tokens]
    for asks in (True, False):
        torch._dynamo.reset()
        options = {"quant": quant, "batch_invariant": not asks}
        fast = moe_ops.compile(
            ranks.layer(rank, world, whole, options), batch_invariant=asks, fullgraph=True
        )
        rows = [] if ranks.replicated else [4]  # a call of no tokens runs eagerly, and would ask
        assert same(fast(*mine, *rows), want), f"asked by {'options' if asks else 'the layer'}"


TWO = {
    "own": Ranks(name="own", tokens=(4, 0), asked={"dp": 2}),
    "replicated": Ranks(name="replicated", tokens=(9,), asked={"tp": 2}, replicated=True),
}


@pytest.mark.slow
@in_turn(
    pytest.mark.parametrize("ranks", TWO.values(), ids=TWO),
    pytest.mark.parametrize("quant", [None, ORDERED], ids=["plain", "ordered_by_expert"]),
)
def test_compiled_layers_have_the_bits_of_one_process(
    ranks: Ranks, quant: QuantConfig | None, tmp_path: Path
) -> None:
    processes(2, tmp_path, compiled, ranks, quant)
