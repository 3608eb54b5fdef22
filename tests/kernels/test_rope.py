"""The op that turns heads and fills a slot of a cache: its kernel, CPU code, schema and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.kernels.rope import refusal, rope_into_cache
from moe_ops.testing import BF16, F16, Tol, assert_close

pytest.importorskip("triton")
from moe_ops.kernels.triton.rope import run

TOL = Tol(3e-3, "float16, rounded up to three times")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sequences, heads of q and of the cache, slots, sizes of heads of keys and of values.
SIZES = [(1, 8, 2, 20, 32, 32), (3, 5, 1, 7, 16, 64), (2, 4, 4, 9, 128, 16)]


def tensors(
    size: tuple[int, ...], dtype: torch.dtype = F16, gains: bool = True, halves: bool = False
) -> tuple[Any, ...]:
    B, H, N, S, D, DV = size

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    angles = torch.randn(1 if halves else B, D // 2 if halves else D, device=DEVICE)
    pair = angles.cos().to(dtype), angles.sin().to(dtype)
    gain = (noise(D), noise(D)) if gains else (None, None)
    slot = torch.tensor([S // 2], device=DEVICE)
    x = noise(B, H, D), noise(B, N, D), noise(B, N, DV)
    return *x, *pair, slot, noise(B, N, S, D), noise(B, N, S, DV), *gain, 1e-5


def definition(given: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """In float64."""
    q, k, v, cos, sin, slot, keys, values, q_gain, k_gain, eps = given

    def turned(x: Tensor, gain: Tensor | None) -> Tensor:
        x = x.double()
        if gain is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain.double()
        h = x.shape[-1] // 2
        c, s = (t.double()[:, None].repeat(1, 1, 2 * h // t.shape[-1]) for t in (cos, sin))
        return x * c + torch.cat([-x[..., h:], x[..., :h]], -1) * s

    keys, values = keys.double(), values.double()
    keys[:, :, int(slot)], values[:, :, int(slot)] = turned(k, k_gain), v.double()
    return turned(q, q_gain), keys, values


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("of", [run, rope_into_cache], ids=["kernel", "op"])
def test_against_float64(of: Any, size: tuple[int, ...], gains: bool, halves: bool) -> None:
    given = tensors(size, gains=gains, halves=halves)
    want = definition(given)
    got = of(*given), given[6], given[7]
    for g, w in zip(got, want, strict=True):
        assert_close(g.float(), w.float(), TOL)
    others = torch.arange(size[3], device=DEVICE) != given[5]
    assert torch.equal(given[6][:, :, others].double(), want[1][:, :, others])
    assert torch.equal(given[7].double(), want[2])


@pytest.mark.parametrize("gains", [False, True])
def test_the_schema(gains: bool) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for halves in (False, True):
        given = tensors(SIZES[1], BF16, gains, halves)
        torch.library.opcheck(
            torch.ops.moe_ops.rope_into_cache.default, given, test_utils=tests
        )  # fmt: skip


def test_refusals_say_why() -> None:
    names = ("q_BHD", "k_BND", "v_BND", "cos_BW", "sin_BW", "slot", "keys_BNSD", "values_BNSD")
    names += ("q_gain_D", "k_gain_D")

    def why(size: tuple[int, ...] = SIZES[0], **but: Any) -> Any:
        return refusal(**dict(zip(names, tensors(size, BF16), strict=False)) | but)

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    assert why() is None and why(q_gain_D=None, k_gain_D=None) is None
    assert why(cos_BW=zeros(1, 16), sin_BW=zeros(1, 16)) is None
    assert why(q_BHD=zeros(1, 1, 8, 32)) == (
        "q is [1, 1, 8, 32], not [B, H, D]; or the caches are no [B, N, S, D]"
    )
    assert why((1, 8, 2, 20, 24, 32)) == "heads of 24, no power of two from 16 to 256"
    assert why((1, 8, 2, 20, 32, 8)) == "heads of 8, no power of two from 16 to 256"
    assert why(q_BHD=zeros(1, 8, 32, dtype=torch.float32)) == (
        "q is torch.float32, not bfloat16 or float16"
    )
    assert why(slot=zeros(2, dtype=torch.int64)) == "the slot is torch.int64 [2], not an int64 [1]"
    assert why(q_gain_D=None) == "one of q and k has a gain, the other has none"
    angles = "the angles are {}, not [1 or 1, 32 or 16]"
    assert why(cos_BW=zeros(1, 8)) == angles.format([1, 8])
    assert why(cos_BW=zeros(2, 32)) == angles.format([2, 32])
    assert why(sin_BW=zeros(1, 16)) == (
        "the sin is [1, 16] with the strides (16, 1), not a contiguous [1, 32]"
    )
    assert why(k_BND=zeros(1, 32, 2).transpose(1, 2)) == (
        "the k is [1, 2, 32] with the strides (64, 1, 2), not a contiguous [1, 2, 32]"
    )
    assert why(keys_BNSD=zeros(1, 2, 21, 32)) == (
        "the cache of keys is [1, 2, 21, 32] with the strides (1344, 672, 32, 1), not a contiguous "
        "[1, 2, 20, 32]"
    )
    assert why(k_gain_D=zeros(32, dtype=F16)) == (
        f"the gain of k is torch.float16 on {zeros(1).device}, q torch.bfloat16 on "
        f"{zeros(1).device}"
    )
    given = tensors((1, 8, 2, 20, 24, 32), BF16)
    with pytest.raises(ValueError, match="rope_into_cache: heads of 24"):
        rope_into_cache(*given)
