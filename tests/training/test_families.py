"""Families of transformers train on our ops: gradients are stock's, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import moe_ops
from moe_ops.testing import Tol, assert_close
from tests.chosen import those_of
from tests.hf import families

# Halves, interleaved with biases, groups, shared experts, no gate, windows, linear attention.
NAMES = (
    "qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "qwen2_moe", "glm4_moe", "nemotron_h",
    "minimax_m2", "ernie4_5_moe", "gemma4", "qwen3_next", "hunyuan_v1_moe", "lfm2_moe", "jamba",
)  # fmt: skip
aten = torch.ops.aten
TOL = Tol(1e-5, "float32 sums in another order, through a whole model")


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    logits.square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def hold(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert_close(got[name], w, TOL, name)


def tiny(name: str) -> tuple[Any, dict[str, Tensor]]:
    made = families.build(name)
    return made.model.float().eval(), families.inputs_for(made, 2, 9, 0)


@pytest.mark.parametrize("name", those_of(("qwen3_moe", "gpt_oss", "nemotron_h"), NAMES))
def test_optimized(name: str) -> None:
    model, inputs = tiny(name)
    want = gradients(model, inputs)
    experts = [m for n, m in families.experts(model).items()]
    moe_ops.optimize(model)
    hold(gradients(model, inputs), want)
    assert experts and all(m.config._experts_implementation == "moe_ops" for m in experts)


@pytest.mark.slow
@pytest.mark.parametrize("name", those_of(("qwen3_moe",), NAMES))
def test_compiled(name: str) -> None:
    """As AOTAutograd makes graphs of forward and backward, which hold the ops."""
    torch._dynamo.reset()
    model, inputs = tiny(name)
    want = gradients(model, inputs)
    fast: Any = moe_ops.compile(model)
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        # Torch traces softplus_backward, for one, with other strides than it gives on a CPU.
        for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
            node.target = aten.reshape.default
        graph.recompile()
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    fast.forward = torch.compile(fast.forward, backend=backend)
    fast._compiled_call_impl = None  # the twin as it is, compiled by that backend
    hold(gradients(fast, inputs), want)
    ops = " ".join(str(node.target) for graph in graphs for node in graph.graph.nodes)
    for op in ("experts_saving", "experts_backward", "expert_wgrad"):
        assert f"moe_ops.{op}" in ops
    assert "grouped_mm" not in ops


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compiled_by_inductor(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = tiny(name)
    want = gradients(model, inputs)
    hold(gradients(moe_ops.compile(model), inputs), want)
