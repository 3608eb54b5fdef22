"""Heads turned and put into a cache on a GPU: the kernel, captured, and a model's steps with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config

import moe_ops
from moe_ops.kernels.linears import linears
from moe_ops.kernels.one_query import one_query
from moe_ops.kernels.rope import rope_into_cache
from moe_ops.passes.compile import pipeline_of
from moe_ops.testing import Tol, assert_close
from tests.hf import families, overrides

pytestmark = pytest.mark.gpu
TOL = {
    torch.bfloat16: Tol(1.6e-2, "up to three roundings to 8 bits of mantissa"),
    torch.float16: Tol(2e-3, "up to three roundings to 11 bits of mantissa"),
}


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("size", [(1, 32, 4, 128), (8, 64, 8, 64), (3, 5, 1, 256)], ids=str)
def test_the_kernel(size: tuple[int, ...], gains: bool, halves: bool, dtype: torch.dtype) -> None:
    """Against the op's CPU code."""
    B, H, N, D = size

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    angles = torch.randn(1 if halves else B, D // 2 if halves else D)
    given = [noise(B, H, D), noise(B, N, D), noise(B, N, D)]
    given += [angles.cos().to(dtype), angles.sin().to(dtype), torch.tensor([37])]
    given += [noise(B, N, 100, D), noise(B, N, 100, D)]
    given += [noise(D), noise(D)] if gains else []
    eps = {"eps": 1e-6} if gains else {}
    ours = [t.cuda() for t in given]
    want, got = rope_into_cache(*given, **eps), rope_into_cache(*ours, **eps)
    assert_close(got.float().cpu(), want.float(), TOL[dtype], "q")
    for place in (6, 7):
        assert_close(ours[place].float().cpu(), given[place].float(), TOL[dtype], f"{place}")
        others = torch.arange(100) != 37
        assert torch.equal(ours[place].cpu()[:, :, others], given[place][:, :, others])


def test_a_layer_whose_launches_overlap_in_a_graph() -> None:
    H, N, D, slots, layers = 32, 4, 128, 256, 12
    make: Any = {"device": "cuda", "dtype": torch.bfloat16}
    sizes = (H * D, N * D, N * D)
    weights = [[torch.randn(n, H * D, **make) / 64 for n in sizes] for _ in range(layers)]
    outs = [torch.randn(H * D, H * D, **make) / 64 for _ in range(layers)]
    caches = torch.zeros(layers, 2, 1, N, slots, D, **make)
    gain = torch.randn(D, **make)
    cos, sin = torch.randn(2, 1, D, **make)
    x, slot = torch.randn(1, H * D, **make), torch.zeros(1, dtype=torch.int64, device="cuda")
    mask = torch.ones(1, slots, dtype=torch.bool, device="cuda")

    def chain(x: Tensor, wait: Any) -> Tensor:
        for ws, out, (keys, values) in zip(weights, outs, caches, strict=True):
            q, k, v = linears(x, ws, [None] * 3)
            wait()
            q, k, v = (t.view(1, -1, D) for t in (q, k, v))
            q = rope_into_cache(q, k, v, cos, sin, slot, keys, values, gain, gain, 1e-6)
            wait()
            heads = one_query(q, keys, values, mask, D**-0.5)
            wait()
            (x,) = linears(heads.view(1, -1), [out], [None], True)
            wait()
        return x

    chain(x, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(x, lambda: None)
    for step in range(20):
        x.copy_(torch.randn_like(x))
        slot.fill_(step)
        before = caches.clone()
        graph.replay()
        got, after = result.clone(), caches.clone()
        caches.copy_(before)
        assert torch.equal(got, chain(x, torch.cuda.synchronize))
        assert torch.equal(after, caches)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_of_a_model(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of captured steps are those of the model's own code, but for roundings."""
    for name, size in (("head_dim", 16), ("hidden_size", 64)):
        monkeypatch.setitem(overrides.SIZES, name, size)
    torch._dynamo.reset()
    model = families.build(family).model.half().cuda()
    ids = torch.randint(16, 90, (batch, 9), device="cuda")
    call: Any = {
        "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    want = model.generate(ids, **call)
    twin = moe_ops.compile(model)
    with config.patch(force_disable_caches=True):
        got = twin.generate(ids, **call)
    for step, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        same = (got.sequences[:, : 9 + step] == want.sequences[:, : 9 + step]).all(1)
        assert (a - b)[same].float().abs().mean() <= 0.02 * b.float().std()
    passes = [p for run in pipeline_of(twin).runs for p in run.passes]
    assert sum(p.rewrites for p in passes if p.name == "fuse_rope") >= 1
