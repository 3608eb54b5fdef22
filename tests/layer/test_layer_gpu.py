"""MoELayer on a CUDA GPU: what it gives on the CPU, captured and replayed, also when compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import BF16, TOL, Tol, assert_close
from tests.layer.shards import randomize

pytestmark = pytest.mark.gpu
RANK = ParallelConfig.of(tp=2, tp_rank=1, expert_parallel=True)
SIZES: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 64,
    "internal_gate": True, "dtype": BF16,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"routing": Routing(score="sigmoid", correction_bias=True, n_group=4, topk_group=2)},
    "rank": {"parallel": RANK, "shared_experts": 1, "bias": True},
    "balanced": {"parallel": RANK, "redundant_experts": 2, "balanced": True},
    "padded": {"hidden_multiple": 192, "intermediate_multiple": 96},
    "mxfp4": {"quant": "mxfp4_w4a16"},
    "fp8": {"quant": QuantConfig(weights="float8_e4m3fn:32x32", inputs="float8_e4m3fn:1x32")},
}  # fmt: skip
# Logits in bfloat16 tie: an expert more or less is another result, so routing is compared apart.
STEP = Tol(5e-2, "a few roundings, or one step of a quantised activation")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_gpu_gives_what_the_cpu_gives(options: dict[str, Any]) -> None:
    layer = randomize(MoELayer(**{**SIZES, **options}))
    on_gpu = copy.deepcopy(layer).cuda()
    x = torch.randn(9, 128, dtype=BF16)
    with torch.inference_mode():
        weights_TK, ids_TK = layer.route(x, layer.gate(x))
        want = layer.run_experts(x, weights_TK, ids_TK)
        got = on_gpu.run_experts(x.cuda(), weights_TK.cuda(), ids_TK.cuda())
    assert_close(got.cpu(), want, STEP)


def captured(layer: MoELayer, x: Tensor, compiled: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run = moe_ops.compile(layer, fullgraph=True) if compiled else layer
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    return graph, out


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_captured_layer_replays_with_other_tokens(
    options: dict[str, Any], compiled: bool
) -> None:
    layer = randomize(MoELayer(**{**SIZES, **options})).cuda()
    x = torch.randn(9, 128, dtype=BF16, device="cuda")
    with torch.inference_mode():
        graph, out = captured(layer, x, compiled)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert_close(out, layer(x), TOL["moe", BF16])


def test_a_captured_layer_sees_moved_experts_and_counts_on() -> None:
    layer = randomize(MoELayer(**SIZES, balanced=True)).cuda()
    x = torch.randn(9, 128, dtype=BF16, device="cuda")
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4], device="cuda")
    with torch.inference_mode():
        graph, out = captured(layer, x, compiled=False)
        graph.replay()
        want = out.clone()
        for t in layer.expert_tensors().values():
            t.copy_(t[order])
        layer.replicas.update_(ExpertReplicas.of(order, 8))
        layer.loads.zero_()
        out.zero_()
        graph.replay()
        assert_close(out, want, TOL["moe", BF16])
    assert int(layer.loads.sum()) == 9 * 2
