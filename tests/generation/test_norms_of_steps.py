"""Steps of one sequence norm each row in the launch of the products that read it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config

import moe_ops
from moe_ops.testing import BF16, F16
from tests import decoding
from tests.hf import families
from tests.uncoded import run_nodes

pytestmark = pytest.mark.slow

# By the family: how many norms its steps have with which shift of the gain; like layers are one.
NORMS = {
    "qwen3_next": {1.0: 4}, "qwen3_5_moe": {1.0: 4}, "gpt_oss": {0.0: 4}, "qwen3_moe": {None: 2},
}  # fmt: skip
ROUNDED = {BF16: 0.02, F16: 0.01}  # what roundings of a model's two layers come to


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """What the passes leave of the graphs, which run node by node: no code is made of them."""
    decoding.on_any_device(monkeypatch)
    made: list[fx.Graph] = []
    run_nodes(monkeypatch, made.append)
    torch._dynamo.reset()
    return made


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_next", BF16),
        pytest.param("qwen3_next", F16, marks=pytest.mark.every),
        pytest.param("qwen3_5_moe", F16, marks=pytest.mark.every),
        pytest.param("gpt_oss", F16, marks=pytest.mark.every),
        pytest.param("qwen3_moe", F16, marks=pytest.mark.every),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_model(
    family: str, dtype: torch.dtype, graphs: list[fx.Graph]
) -> None:
    model = families.build(family).model.to(dtype)
    ids = torch.randint(16, 90, (1, 9), generator=torch.Generator().manual_seed(0))
    call: Any = {
        "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    with config.patch(fx_graph_cache=False):
        got = moe_ops.compile(model).generate(ids, **call)
    want = model.generate(ids, **call)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        # On average: where two experts are all but equal a rounding decides.
        assert (a - b).float().abs().mean() <= ROUNDED[dtype] * b.float().std()
    target = torch.ops.moe_ops.normed_linears.planned
    nodes = [n for g in graphs for n in g.find_nodes(op="call_function", target=target)]
    assert Counter(n.args[6] for n in nodes) == NORMS[family]
