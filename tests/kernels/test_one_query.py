"""Attention of one query: the kernel, and transformers' interface to it, against plain softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_ops.testing import F32, Tol, assert_close

pytest.importorskip("triton")
from moe_ops.kernels.triton.one_query import attend, refusal

TOL = Tol(1e-5, "float32 sums in another order")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sequences, heads, heads of the cache, slots, head sizes of keys and values.
SIZES = [
    (1, 8, 1, 64, 16, 16),
    (3, 6, 2, 100, 32, 16),
    (2, 4, 4, 256, 64, 64),
    (2, 32, 1, 33, 16, 16),
]


def tensors(size: tuple[int, ...]) -> tuple[Tensor, ...]:
    B, H, N, S, D, DV = size
    q = torch.randn(B, H, D, device=DEVICE)
    k, v = torch.randn(B, N, S, D, device=DEVICE), torch.randn(B, N, S, DV, device=DEVICE)
    mask = torch.rand(B, S, device=DEVICE) < 0.5
    mask[:, S // 2 :] = False
    mask[0, : S // 2 - 1] = False  # one slot alone, behind a tile without any
    mask[:, S // 2 - 1] = True
    return q, k, v, mask


def definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1).double() for x in (k, v))
    scores = (k @ q.double()[..., None])[..., 0] * scale
    p = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    return (p[:, :, None] @ v)[:, :, 0].to(F32)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel(size: tuple[int, ...]) -> None:
    q, k, v, mask = tensors(size)
    v[:, :, -1] = float("nan")  # behind the last slot that is not masked
    want = definition(q, k, v.nan_to_num(), mask, 0.3)
    assert_close(attend(q, k, v.nan_to_num(), mask, 0.3), want, TOL, "kernel")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_attention_function(size: tuple[int, ...]) -> None:
    from moe_ops.hf.one_query import one_query_attention

    q, k, v, mask = tensors(size)
    module = nn.Module()
    module.num_key_value_groups = q.shape[1] // k.shape[1]
    got, _ = one_query_attention(module, q[:, :, None], k, v, mask[:, None, None], scaling=0.3)
    assert_close(got[:, 0], definition(q, k, v, mask, 0.3), TOL, "function")


def test_refusals_say_why() -> None:
    meta = torch.empty(1, 2, 2000, 24, device="meta")
    assert refusal(meta, meta, meta) == "needs CUDA"
