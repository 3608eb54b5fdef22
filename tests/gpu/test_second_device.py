"""Tensors and models on a GPU that is not the current one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import experts, using
from moe_ops.decode_ops import linears, normed_linears
from moe_ops.decode_ops.one_query import one_query
from moe_ops.decode_ops.rope_attention import rope_attention
from moe_ops.graphs.capture import GraphRunner
from moe_ops.testing import BF16, Case, Layer, make_layer
from tests.generation.steps import check_steps
from tests.hf import overrides

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

FIRST, SECOND = "cuda:0", "cuda:1"


@pytest.fixture(autouse=True)
def first_stays_current() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    assert torch.cuda.current_device() == 0


def made(T: int, device: str) -> Layer:
    """On both devices the same."""
    layer = make_layer(Case(name="second", T=T, E=32, K=4, D=512, I=256), BF16)
    return Layer(**{f.name: getattr(layer, f.name).to(device) for f in fields(Layer)})


def same(first: Tensor, second: Tensor) -> None:
    assert str(second.device) == SECOND
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("T", [2, 40, 600])
@pytest.mark.parametrize("backend", [b for b in experts.backends if b.startswith("triton.")])
def test_experts(backend: str, T: int) -> None:
    layers = [made(T, device) for device in (FIRST, SECOND)]
    calls = [(a.x_TD, a.weights_TK, a.ids_TK, a.w13_EFD, a.w2_EDI) for a in layers]
    refusal = experts.backends[backend].refusal("cuda", T, experts.call(*calls[0]))
    if refusal is not None:
        pytest.skip(f"{backend} {refusal}")
    with using(backend, "experts"):
        same(*(experts(*call) for call in calls))


def test_the_other_stages() -> None:
    layers = [made(50, device) for device in (FIRST, SECOND)]
    found = []
    for a in layers:
        weights_TK, ids_TK = moe_ops.route(a.logits_TE, 4)
        x_RD, rows_R, ends_E = moe_ops.dispatch(a.x_TD, ids_TK, 32)
        with using("triton", "expert_gemm"):
            y_RF = moe_ops.expert_gemm(x_RD, a.w13_EFD, ends_E)
        found.append((weights_TK, ids_TK, rows_R, y_RF))
    for first, second in zip(*found, strict=True):
        same(first, second)


def test_what_lies_between_experts() -> None:
    x_TK, weight, gain = torch.randn(1, 512), torch.randn(384, 512), torch.randn(512)
    q_BHD, k_BND, v_BND = torch.randn(1, 16, 64), torch.randn(1, 4, 64), torch.randn(1, 4, 64)
    cos, sin = torch.randn(1, 64), torch.randn(1, 64)
    caches = torch.randn(2, 1, 4, 256, 64)
    given = [x_TK, weight, gain, q_BHD, k_BND, v_BND, cos, sin, *caches]
    found = []
    for device in (FIRST, SECOND):
        x, w, g, q, k, v, c, s, keys, values = (t.to(device, BF16) for t in given)
        mask = torch.arange(256, device=device)[None] <= 100
        at = torch.tensor([100], device=device)
        one = rope_attention(q, k, v, c, s, at, keys, values, mask, scale=0.125)
        other = one_query(q, keys, values, mask, 0.125)
        rows = [*linears(x, [w], [None]), *normed_linears(x, None, g, 1e-6, [w], [None])]
        found.append((one, other, keys, values, *rows))
    for first, second in zip(*found, strict=True):
        same(first, second)


def test_captured_buckets() -> None:
    def block(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return moe_ops.moe(x, logits, w13, w2, 4)

    run = GraphRunner(block, buckets=(1, 8, 64), varying=2)
    for T in (1, 5, 64, 5):
        a = made(T, SECOND)
        got = run(a.x_TD, a.logits_TE, a.w13_EFD, a.w2_EDI)
        want = block(a.x_TD, a.logits_TE, a.w13_EFD, a.w2_EDI)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert all(r.hits for r in run.report())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_steps_of_a_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("head_dim", 16), ("hidden_size", 64)):
        monkeypatch.setitem(overrides.SIZES, name, size)
    check_steps(family, 1, "fuse_rope", least=1, times=4, device=SECOND)
