"""From projections to attention on a GPU: the kernels, captured, and a model's steps with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.decode_ops.linears import linears
from moe_ops.decode_ops.rope_attention import rope_attention
from moe_ops.testing import Tol, assert_close
from tests.generation.steps import check_steps
from tests.gpu.captures import captured
from tests.hf import overrides

pytestmark = pytest.mark.gpu
TOL = {
    torch.bfloat16: Tol(1.6e-2, "up to three roundings to 8 bits of mantissa"),
    torch.float16: Tol(2e-3, "up to three roundings to 11 bits of mantissa"),
}


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize(
    "size",
    [
        (1, 32, 4, 128, 256), (8, 64, 8, 64, 512), (3, 5, 1, 256, 64), (2, 8, 8, 128, 1024),
        (1, 64, 8, 64, 512), (1, 32, 4, 128, 4096), (1, 16, 1, 128, 700),
    ],
    ids=str,
)  # fmt: skip
def test_the_kernels(size: tuple[int, ...], gains: bool, halves: bool, dtype: torch.dtype) -> None:
    """Against the op's CPU code; of a cache that one launch takes, that two take, and three."""
    B, H, N, D, slots = size
    slot = slots - 27

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    angles = torch.randn(1 if halves else B, D // 2 if halves else D)
    given = [noise(B, H, D), noise(B, N, D), noise(B, N, D)]
    given += [angles.cos().to(dtype), angles.sin().to(dtype), torch.tensor([slot])]
    given += [
        noise(B, N, slots, D),
        noise(B, N, slots, D),
        torch.arange(slots).expand(B, -1) <= slot,
    ]
    rest: dict[str, Any] = {"scale": D**-0.5}
    if gains:
        rest |= {"q_gain_D": noise(D), "k_gain_D": noise(D), "eps": 1e-6, "sinks_H": noise(H)}
    ours = [t.cuda() for t in given]
    on_gpu = {n: t.cuda() if isinstance(t, Tensor) else t for n, t in rest.items()}
    for cache in ours[6:8]:
        cache[:, :, slot:] = float("nan")
    want, got = rope_attention(*given, **rest), rope_attention(*ours, **on_gpu)
    assert_close(got.float().cpu(), want.float(), TOL[dtype], "attention")
    for place in (6, 7):
        old, new = given[place][:, :, : slot + 1].float(), ours[place].cpu()
        assert_close(new[:, :, : slot + 1].float(), old, TOL[dtype], f"{place}")
        assert bool(new[:, :, slot + 1 :].isnan().all())


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("slots", [256, 1024])
def test_a_layer_whose_launches_overlap_in_a_graph(slots: int) -> None:
    H, N, D, layers = 32, 4, 128, 12
    make: Any = {"device": "cuda", "dtype": torch.bfloat16}
    sizes = (H * D, N * D, N * D)
    weights = [[torch.randn(n, H * D, **make) / 64 for n in sizes] for _ in range(layers)]
    outs = [torch.randn(H * D, H * D, **make) / 64 for _ in range(layers)]
    caches = torch.zeros(layers, 2, 1, N, slots, D, **make)
    gain = torch.randn(D, **make)
    cos, sin = torch.randn(2, 1, D, **make)
    x, slot = torch.randn(1, H * D, **make), torch.zeros(1, dtype=torch.int64, device="cuda")
    mask = torch.zeros(1, slots, dtype=torch.bool, device="cuda")

    def chain(x: Tensor, wait: Any) -> Tensor:
        for ws, out, (keys, values) in zip(weights, outs, caches, strict=True):
            q, k, v = (t.view(1, -1, D) for t in linears(x, ws, [None] * 3))
            wait()
            given = (q, k, v, cos, sin, slot, keys, values, mask)
            heads = rope_attention(*given, D**-0.5, gain, gain, 1e-6)
            wait()
            (x,) = linears(heads.view(1, -1), [out], [None])
            wait()
        return x

    chain(x, torch.cuda.synchronize)
    graph, result = captured(lambda: chain(x, lambda: None))
    for step in range(20):
        x.copy_(torch.randn_like(x))
        slot.fill_(step)
        mask[:, step] = True
        before = caches.clone()
        graph.replay()
        got, after = result.clone(), caches.clone()
        caches.copy_(before)
        assert torch.equal(got, chain(x, torch.cuda.synchronize))
        assert torch.equal(after, caches)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_of_a_model(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of captured steps are those of the model's own code, but for roundings."""
    for name, size in (("head_dim", 16), ("hidden_size", 64)):
        monkeypatch.setitem(overrides.SIZES, name, size)
    check_steps(family, batch, "fuse_rope", least=1)
