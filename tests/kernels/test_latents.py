"""Attention of one query over latents: the kernels against float64.

The interpreter multiplies float16 and float32 alone, so bfloat16 is left to tests/gpu.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.testing import F16, F32, Tol, assert_close
from tests.chosen import in_turn
from tests.decode_ops.latents import SIZES, Size, arguments, definition, with_garbage

pytest.importorskip("triton")
from moe_ops.backends import triton_decode
from moe_ops.backends.triton_decode import supports_latents
from moe_ops.decode_ops.one_query_latents import OneQueryLatentsCall
from moe_ops.kernels.triton.decode.latents import attend
from moe_ops.kernels.triton.decode.latents_plan import (
    LEAST_TILES,
    MOST_HEADS,
    MOST_SLOTS,
    MOST_SPAN,
    MOST_SPLITS,
    LatentsPlan,
    Sizes,
    plan_for,
)

TOL = {
    F32: Tol(1e-5, "float32 sums in another order"),
    F16: Tol(2e-3, "weights and outputs rounded to the 11 bits of float16"),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200, H100_BYTES = 132, 232448  # processors, bytes of shared memory for a block
LEAST_BYTES = 99 * 1024  # where there is least (sm_86, sm_89)


def on_device(call: dict[str, Any]) -> dict[str, Any]:
    return {n: v.to(DEVICE) if isinstance(v, Tensor) else v for n, v in call.items()}


def split(counted: int, splits: int, tile: int, heads: int = 16) -> LatentsPlan:
    """As many programs as that, or one for each tile where they are fewer."""
    tiles = -(-counted // tile)
    splits = min(splits, tiles)
    return LatentsPlan(heads, splits, -(-tiles // splits), tile, 4, 2)


def counted(size: Size) -> int:
    return size.chosen or size.S


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel(size: str) -> None:
    call = arguments(SIZES[size])
    got = attend(**on_device(with_garbage(call)))
    assert got.is_contiguous()
    assert_close(got.cpu(), definition(call), TOL[F32], size)


@pytest.mark.parametrize("size", ["20 heads", "chosen of an added mask", "sinks"])
def test_float16(size: str) -> None:
    call = arguments(SIZES[size], F16)
    got = attend(**on_device(with_garbage(call)))
    assert got.dtype == F16
    assert_close(got.float().cpu(), definition(call), TOL[F16], size)


@in_turn(
    pytest.mark.parametrize(
        "size", ["20 heads", "sinks", "chosen", "an added mask and sinks", "nothing rotated"]
    ),
    pytest.mark.parametrize("splits", [1, 3, pytest.param(5, marks=pytest.mark.slow)]),
)
def test_every_way_to_share_the_slots(size: str, splits: int) -> None:
    """With the same bits again."""
    call = arguments(SIZES[size])
    here = on_device(with_garbage(call))
    want = definition(call)
    for tile, heads in ((16, 16), (16, 32), (32, 16), (16, MOST_HEADS)):
        plan = split(counted(SIZES[size]), splits, tile, heads)
        got = attend(**here, plan=plan)
        assert_close(got.cpu(), want, TOL[F32], str(plan))
        assert torch.equal(got, attend(**here, plan=plan))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_sink_larger_than_every_score_leaves_nothing(splits: int) -> None:
    call = on_device(arguments(Size(H=4, S=64, sinks=True)))
    call["sinks_H"].fill_(1e4)
    assert not attend(**call, plan=split(64, splits, 16)).any()
    call["mask_BS"].fill_(False)
    assert not attend(**call, plan=split(64, splits, 16)).any()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_does_not_depend_on_others(splits: int) -> None:
    """Nor on how long they are."""
    call = on_device(arguments(Size(B=3, H=4)))
    plan = split(70, splits, 16)
    want = attend(**call, plan=plan)
    call["mask_BS"][0] = call["mask_BS"][2] = True
    got = attend(**call, plan=plan)
    assert torch.equal(got[1], want[1]) and not torch.equal(got, want)


def test_programs_share_what_is_filled() -> None:
    """Every program finds something of the first half of the slots, and none of the rest."""
    call = arguments(Size(B=1, H=4, S=256))
    call["mask_BS"] = torch.arange(256)[None] < 128
    call = on_device(with_garbage(call | {"latents_BSR": call["latents_BSR"] + 9}))
    plan = split(256, 4, 16)
    whole = attend(**call, plan=plan)
    for program in range(4):
        own = (torch.arange(256, device=DEVICE) // 16 % 4 == program)[None]
        left = attend(**{**call, "mask_BS": call["mask_BS"] & ~own}, plan=plan)
        assert not torch.equal(left, whole), program


@pytest.mark.parametrize("used", [0, 20, 63])
def test_one_slot_in_use(used: int) -> None:
    """Its latent is the output."""
    call = on_device(arguments(Size(B=1, H=4, S=64)))
    call["mask_BS"] = torch.arange(64, device=DEVICE)[None] == used
    for plan in (None, split(64, 4, 16)):
        got = attend(**call, plan=plan)
        want = call["latents_BSR"][:, used, None].expand(-1, 4, -1)
        assert_close(got, want, TOL[F32], f"{used} {plan}")


def test_plans_cover_the_slots_and_fit() -> None:
    for batch, heads, slots, row_bytes, memory in itertools.product(
        (1, 2, 8, 32, 64, 256),
        (1, 8, 16, 20, 64, 96, 128),
        (1, 16, 17, 250, 256, 512, 3000, 4096, 8192, 32768, MOST_SLOTS),
        (576, 1152, 2304),
        (LEAST_BYTES, H100_BYTES),
    ):
        sizes = Sizes(batch, heads, slots, row_bytes)
        plan = plan_for(sizes, H200, memory)
        what = f"{sizes}: {plan}"
        assert plan.splits * plan.tiles * plan.tile >= slots, what
        assert (plan.splits - 1) * plan.tile < slots, what  # none idle where all slots are filled
        assert 1 <= plan.splits <= MOST_SPLITS, what
        assert plan.splits == 1 or plan.tiles >= LEAST_TILES, what
        assert plan.tiles * plan.tile <= MOST_SPAN, what
        for size in (plan.tile, plan.heads):
            assert size >= 16 and size & (size - 1) == 0, what
        assert plan.heads == 16 or plan.heads < 2 * heads, what
        tiles = plan.stages * plan.tile * row_bytes
        assert plan.stages >= 1 and plan.heads * row_bytes + tiles <= memory, what


def test_processors_are_all_in_use() -> None:
    plans = {
        (batch, slots, heads): plan_for(Sizes(batch, heads, slots, 1152), H200, H100_BYTES)
        for batch, slots, heads in (
            (1, 4096, 128), (32, 4096, 128), (32, 4096, 20), (8, 8192, 128), (1, 512, 16),
        )
    }  # fmt: skip
    assert {call: (p.heads, p.splits, p.tile) for call, p in plans.items()} == {
        (1, 4096, 128): (64, 32, 64), (32, 4096, 128): (64, 2, 64),
        (32, 4096, 20): (32, 4, 64), (8, 8192, 128): (64, 8, 64), (1, 512, 16): (16, 8, 32),
    }  # fmt: skip


def test_what_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(**but: int) -> str | None:
        call = arguments(Size(B=1, **but))
        return supports_latents(OneQueryLatentsCall(**call))

    monkeypatch.setattr(triton_decode, "refuse_device", lambda t: None)
    assert why() is None
    assert why(R=24) == "needs latents of a power of two from 16 to 512, got 24"
    assert why(R=1024) == "needs latents of a power of two from 16 to 512, got 1024"
    assert why(D=8) == ("needs rotated keys of none, or of a power of two from 16 to 256, got 8")
    assert why(D=0) is None
    monkeypatch.setattr(triton_decode, "MOST_SLOTS", 69)
    assert why() == "needs at most 69 slots to look at, got 70"
    assert why(chosen=69) is None and why(S=80, chosen=70) is not None
