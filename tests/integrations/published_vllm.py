"""One rank of layers that the installed vLLM makes on a CPU, with the plugin:
`published_vllm.py RANK RANKS columns|experts PORT NAME...`. Raises if a layer is wrong."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.models.transformers import moe

from moe_ops.integrations.vllm import register
from moe_ops.integrations.vllm.method import ExpertsMethod
from moe_ops.testing import TOL, assert_close
from tests.integrations import vllm_on_cpu  # noqa: F401  ahead of the rest of vLLM
from tests.integrations.vllm_layers import LAYERS, D, E, I, Layer


def made(layer: Layer, name: str) -> Any:
    """What vLLM puts in place of the `experts` child of a block whose router it leaves alone."""
    state = moe.TransformersMoEState()
    return FusedMoEFactory(
        num_experts=E, top_k=layer.top_k, hidden_size=D, intermediate_size=I,
        prefix=f"model.layers.{list(LAYERS).index(name)}.mlp.experts", activation=layer.activation,
        has_bias=layer.has_bias, routed_experts_cls=moe.TransformersRoutedExperts,
        custom_routing_function=partial(moe._hf_topk_router_precomputed, moe_state=state),
        runner_cls=moe.TransformersMoERunner, runner_args={"moe_state": state}, **layer.options,
    )  # fmt: skip


def load(runner: Any, weights: dict[str, Tensor]) -> None:
    """As from a checkpoint of transformers. vLLM's loader takes no biases of all experts at once,
    but those of one expert."""
    named = {"gate_up_proj": weights["w13_weight"], "down_proj": weights["w2_weight"]}
    assert len(set(runner.load_weights(named.items()))) == 2
    experts = runner.routed_experts
    if "w13_bias" in weights:
        for e in range(E):
            gate, up = weights["w13_bias"][e].chunk(2)
            for one, shard in ((gate, "w1"), (up, "w3")):
                experts.weight_loader(experts.w13_bias, one, "w13_bias", shard, e)
            experts.weight_loader(experts.w2_bias, weights["w2_bias"][e], "w2_bias", "w2", e)


def check(layer: Layer, name: str, config: VllmConfig) -> None:
    torch.manual_seed(0)  # every rank has the same layer
    weights, given = layer.weights(), layer.tokens()
    runner = made(layer, name)
    experts = runner.routed_experts
    assert type(experts.quant_method) is ExpertsMethod
    load(runner, weights)
    experts.quant_method.process_weights_after_loading(experts)
    with set_forward_context(None, config), torch.inference_mode():
        out = runner(*given)
    assert_close(out, layer.loop(weights, *given), TOL["experts", torch.float32], name)


def main(rank: int, ranks: int, split: str, port: str, names: list[str]) -> None:
    register()
    parallel = ParallelConfig(enable_expert_parallel=split == "experts")
    parallel.tensor_parallel_size = ranks
    config = VllmConfig(parallel_config=parallel)
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(ranks, 1)
        for name in names:
            check(LAYERS[name], name, config)
    print("right:", *names)


if __name__ == "__main__":
    rank, ranks, split, port, *names = sys.argv[1:]
    main(int(rank), int(ranks), split, port, names)
