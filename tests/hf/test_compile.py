"""Whole models under torch.compile: one full graph for every token count, the same results."""

from __future__ import annotations

import pytest
import torch
import torch.fx.experimental._config as shape_config
import transformers
from packaging.version import Version
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops.testing import F32, TOL, assert_close
from tests.hf import attention, families

MODEL = TOL["model", F32]

# Before 5.23 rotary embeddings are a matrix product (inv_freq @ position_ids), whose decomposition
# in torch branches on a sequence of one token: a second graph, for that length alone.
GRAPHS = 1 if Version(transformers.__version__) >= Version("5.23") else 2

# Families by what their routers do; between them they take every branch of `route`.
ROUTERS = {
    "qwen3_moe": "softmax, renormalised, weights in the model's dtype",
    "mixtral": "softmax, renormalised, float32 weights",
    "olmoe": "softmax, not renormalised",
    "hunyuan_v1_moe": "softmax, a linear of its own, shared expert",
    "deepseek_ocr2": "softmax, groups by their maximum",
    "unlimited_ocr": "softmax, groups by their maximum, shared expert",
    "gpt_oss": "top-k, then softmax; biased, clamped, interleaved, transposed experts",
    "granitemoe": "top-k, then softmax",
    "aria": "top-k, then softmax; transposed experts",
    "glm4_moe": "sigmoid with selection bias, groups by their two largest",
    "dots1": "sigmoid with selection bias, groups by their two largest",
    "beam": "sigmoid with selection bias, groups, no scale",
    "afmoe": "sigmoid, the bias given by the caller",
    "hy_v3": "sigmoid, the bias given by the caller, scaled",
    "minimax_m2": "sigmoid, the bias given by the caller, no eps",
    "minimax_m3_vl": "sigmoid with own bias; clamped and shifted experts",
    "laguna": "sigmoid of softcapped logits",
    "kolibri1": "sigmoid, the bias on the logits",
    "flint": "sigmoid, no bias",
    "phimoe": "a router that keeps its own code",
}


# Inductor compiles qwen3_moe in tests/generation, too, so that here tracing it is enough.
EACH = [
    ("aot_eager", "qwen3_moe"),
    *(pytest.param("inductor", family, marks=pytest.mark.every) for family in ROUTERS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "family"), EACH)
def test_one_graph_serves_every_token_count(backend: str, family: str) -> None:
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    torch._dynamo.reset()
    tiny = families.build(family)
    tiny.model.set_attn_implementation(attention.register())
    tokens = {T: torch.randint(3, 90, (1, T)) for T in (7, 2, 33, 1)}
    with torch.inference_mode():
        want = {T: tiny.model(input_ids=ids, use_cache=False)[0] for T, ids in tokens.items()}

    moe_ops.optimize(tiny.model)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(tiny.model, fullgraph=True, backend=counter)
    with torch.inference_mode(), shape_config.patch(backed_size_oblivious=True):
        allowed = 1
        for T, ids in (*tokens.items(), *tokens.items()):
            torch._dynamo.mark_dynamic(ids, 1)
            got = compiled(input_ids=ids, use_cache=False)[0]
            assert_close(got, want[T], MODEL, f"{family}, {T} tokens")
            allowed = GRAPHS if T == 1 else allowed
            assert counter.frame_count <= allowed
    ours = [str(n.target) for n in counter.graphs[0].graph.nodes if "moe_ops." in str(n.target)]
    assert "moe_ops.experts.default" in ours
    assert ("moe_ops.route.default" in ours) == (family != "phimoe")
