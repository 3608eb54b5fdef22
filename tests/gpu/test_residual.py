"""A residual that the experts' last launch adds, on a GPU: the bits, captured, and in a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.decode_ops.experts_onto import experts_onto
from moe_ops.ops import experts
from tests.generation.steps import check_steps
from tests.gpu.captures import captured
from tests.hf import overrides

pytestmark = pytest.mark.gpu
ACT = ("silu", True, False, 1.0, None, 0.0)
KERNELS = {"triton.tiny": (1, 2, 4), "triton.rows": (1, 8, 64), "triton.grouped": (1, 300)}


def tensors(T: int, dtype: torch.dtype) -> tuple[Any, ...]:
    make: Any = {"device": "cuda", "dtype": dtype}
    x, w13 = torch.randn(T, 256, **make), torch.randn(16, 384, 256, **make) / 16
    w2 = torch.randn(16, 256, 192, **make) / 14
    ids = torch.rand(T, 16, device="cuda").argsort(1)[:, :4].int()
    biases = torch.randn(16, 384, **make), torch.randn(16, 256, **make)
    return x, torch.rand(T, 4, device="cuda"), ids, w13, w2, *biases, None, False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("plan", "T"), [(p, T) for p, Ts in KERNELS.items() for T in Ts])
def test_the_bits_of_a_sum_of_its_own(plan: str, T: int, dtype: torch.dtype) -> None:
    given = tensors(T, dtype)
    residual = torch.randn_like(given[0])
    want = residual + experts.backends[plan].run(experts.call(*given, *ACT))
    assert torch.equal(experts_onto.planned(residual, *given, *ACT, plan=plan), want)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize(
    ("plan", "T"), [("triton.tiny", 1), ("triton.tiny", 4), ("triton.rows", 8)]
)
def test_layers_whose_launches_overlap_in_a_graph(plan: str, T: int) -> None:
    """What one adds to is what the one before it has written."""
    given = tensors(T, torch.bfloat16)
    x = torch.randn_like(given[0])

    def chain(x: Tensor, wait: Any) -> Tensor:
        for _ in range(12):
            x = experts_onto.planned(x, *given, *ACT, plan=plan)
            wait()
        return x

    chain(x, torch.cuda.synchronize)
    graph, out = captured(lambda: chain(x, lambda: None))
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out.clone(), chain(x, torch.cuda.synchronize))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_step_of_a_model(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of captured steps are those of the model's own code, but for roundings."""
    monkeypatch.setitem(overrides.SIZES, "hidden_size", 64)
    check_steps(family, batch, "fuse_residual", least=1)
