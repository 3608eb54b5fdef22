"""MoELayer under torch.compile, torch.export and moe_ops.compile: one graph, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import BF16, GPT_OSS, TOL, Tol, assert_close
from tests.chosen import those_of
from tests.layer.shards import randomize

EXACT = Tol(1e-6, "the same ops")
RANK = ParallelConfig.of(tp=2, tp_rank=1, expert_parallel=True)
SIZES: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32,
    "internal_gate": True,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"routing": Routing(score="sigmoid", correction_bias=True, n_group=4, topk_group=2)},
    "rank": {"parallel": RANK, "shared_experts": 1, "bias": True},
    "balanced": {"parallel": RANK, "redundant_experts": 2, "balanced": True, "shared_experts": 1},
    "custom": {"routing": Routing(custom=lambda x, logits, k: logits.softmax(-1).topk(k))},
    "gpt_oss": {"activation": Activation(kind="silu", **GPT_OSS), "bias": True},
    "padded": {"hidden_multiple": 48, "intermediate_multiple": 48},
    "mxfp4": {"quant": "mxfp4_w4a16"},
    "fp8": {"quant": QuantConfig(weights="float8_e4m3fn:16x32", inputs="float8_e4m3fn:1x32")},
    "per_expert": {
        "quant": QuantConfig(
            weights="int8:row", inputs="int8:tensor", static_inputs=True, per_expert_inputs=True
        )
    },
    "nvfp4": {"quant": QuantConfig(weights="nvfp4", inputs="nvfp4", static_inputs=True)},
    "on_input": {"top_k": 1, "routing": Routing(score="sigmoid", weight_on_input=True)},
    "modules": {
        "shared_experts": nn.Linear(64, 64),
        "shared_reduction": "replicated",
        "routed_input_transform": nn.Linear(64, 64),
    },
}  # fmt: skip


def calls(graph: fx.Graph, op: Any) -> int:
    return sum(node.target == op for node in graph.nodes)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


QUICK = ("plain", "rank", "nvfp4")
MARKS = {name: [pytest.mark.slow] for name in OPTIONS if name not in QUICK}
# Other codes, biases and routers are above, and all options are exported.
for name in ("fp8", "gpt_oss", "mxfp4", "per_expert", "on_input", "grouped", "custom"):
    MARKS[name].append(pytest.mark.every)
QUICK_FIRST = [
    pytest.param(options, id=name, marks=MARKS.get(name, [])) for name, options in OPTIONS.items()
]


@pytest.mark.parametrize("options", QUICK_FIRST)
def test_two_layers_and_all_token_counts_share_one_graph(options: dict[str, Any]) -> None:
    layers = [randomize(MoELayer(**{**SIZES, **options}), seed) for seed in (0, 1)]
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    results = []
    with torch.inference_mode():
        for T in (9, 4):
            x = torch.randn(T, 64)
            for layer in layers:
                results.append(run(layer, x))
                assert_close(results[-1], layer(x), EXACT)
    assert not torch.equal(results[0], results[1])  # each with its own weights
    with_experts = [g for g in counter.graphs if calls(g.graph, torch.ops.moe_ops.experts.default)]
    assert len(with_experts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_exported(options: dict[str, Any]) -> None:
    layer = randomize(MoELayer(**{**SIZES, **options}))
    dim = torch.export.Dim("T", min=2)
    exported = torch.export.export(layer, (torch.randn(9, 64),), dynamic_shapes=({0: dim},))
    assert calls(exported.graph, torch.ops.moe_ops.experts.default) == 1
    with torch.inference_mode():
        for T in (9, 5):
            x = torch.randn(T, 64)
            assert_close(exported.module()(x), layer(x), EXACT)


def test_a_compiled_layer_counts_loads() -> None:
    layer = randomize(MoELayer(**SIZES, balanced=True))
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(7, 64)
    with torch.inference_mode():
        for _ in range(3):
            run(x)
        ids_TK = moe_ops.route(layer.gate(x), 2)[1]
    assert torch.equal(layer.loads, 3 * torch.bincount(ids_TK.flatten(), minlength=8))


def test_moved_experts_are_seen_by_a_compiled_layer() -> None:
    layer = randomize(MoELayer(**SIZES, balanced=True))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, fullgraph=True, backend=counter)
    x, order = torch.randn(7, 64), torch.randperm(8)
    with torch.inference_mode():
        want = run(x)
        compiled = counter.frame_count
        for t in layer.expert_tensors().values():
            t.copy_(t[order])
        layer.replicas.update_(type(layer.replicas).of(order, 8))
        assert_close(run(x), want, EXACT)
        assert not torch.equal(order, torch.arange(8))
    assert counter.frame_count == compiled


def test_gradients_need_no_graph_break() -> None:
    layer = randomize(MoELayer(**SIZES))
    x = torch.randn(7, 64)
    params = list(layer.parameters())
    want = torch.autograd.grad(layer(x).square().sum(), params)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        fast = torch.compile(layer, fullgraph=True, backend=backend)
        got = torch.autograd.grad(fast(x).square().sum(), params)
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, TOL["moe", torch.float32])


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(randomize(MoELayer(**options), seed) for seed in (0, 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.every), BF16], ids=str
)
# What is plain is part of what is balanced.
@pytest.mark.parametrize("name", those_of(["mxfp4"], ["plain", "balanced", "mxfp4"]))
def test_inductor_with_our_passes(name: str, dtype: torch.dtype) -> None:
    block = Block(**{**SIZES, **OPTIONS[name]}, dtype=dtype)
    x = torch.randn(9, 64, dtype=dtype)
    with torch.inference_mode():
        want = block(x)
        got = moe_ops.compile(block, fullgraph=True)(x)
    assert_close(got, want, TOL["moe", dtype])
