"""The kernel for Hopper over latents, by torch (see `latents_in_torch.py`), against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from moe_ops.testing import BF16, DEVICE, F16, F32, Tol, assert_close
from tests.chosen import in_turn
from tests.decode_ops.latents import SIZES, Size, arguments, definition, with_garbage

pytest.importorskip("triton")
from moe_ops.kernels.triton.decode import latents
from moe_ops.kernels.triton.decode.latents_plan import (
    MOST_HEADS,
    MOST_SLOTS,
    MOST_SPAN,
    MOST_SPLITS,
    HopperPlan,
    LatentsPlan,
    Sizes,
    fits_hopper,
    hopper_plan_for,
)
from tests.kernels import latents_in_torch

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")

TOL = {
    F32: Tol(1e-5, "float32 sums in another order"),
    F16: Tol(2e-3, "weights and outputs rounded to the 11 bits of float16"),
    BF16: Tol(1.6e-2, "weights and outputs rounded to the 8 bits of bfloat16"),
}
H200, H100_BYTES = 132, 232448  # processors, bytes of shared memory for a block
# Splits, slots of a tile, stages: of one program, of several, of more stages than tiles.
WAYS = ((1, 16, 2), (3, 16, 3), (2, 32, 4))


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "launch", latents_in_torch.launch)


def planned(counted: int, splits: int, tile: int, stages: int) -> HopperPlan:
    """As many programs as that, or one for each tile where they are fewer."""
    tiles = -(-counted // tile)
    splits = min(splits, tiles)
    return HopperPlan(splits, -(-tiles // splits), tile, stages)


@in_turn(pytest.mark.parametrize("size", SIZES), pytest.mark.parametrize("way", WAYS, ids=str))
def test_the_kernel(size: str, way: tuple[int, int, int]) -> None:
    call = arguments(SIZES[size])
    plan = planned(SIZES[size].chosen or SIZES[size].S, *way)
    got = latents.attend(**with_garbage(call), plan=plan)
    assert got.is_contiguous()
    assert_close(got, definition(call), TOL[F32], f"{size} {plan}")


@in_turn(
    pytest.mark.parametrize("size", ["20 heads", "chosen of an added mask", "sinks"]),
    pytest.mark.parametrize("dtype", [F16, BF16], ids=str),
)
def test_16_bits(size: str, dtype: torch.dtype) -> None:
    call = arguments(SIZES[size], dtype)
    plan = planned(SIZES[size].chosen or SIZES[size].S, 3, 16, 2)
    got = latents.attend(**with_garbage(call), plan=plan)
    assert got.dtype == dtype
    assert_close(got.float(), definition(call), TOL[dtype], size)


@pytest.mark.parametrize("used", [0, 20, 63])
def test_one_slot_in_use(used: int) -> None:
    """Its latent is the output; all but one program see none."""
    call = arguments(Size(B=1, H=4, S=64))
    call["mask_BS"] = torch.arange(64)[None] == used
    got = latents.attend(**with_garbage(call), plan=planned(64, 4, 16, 2))
    want = call["latents_BSR"][:, used, None].expand(-1, 4, -1)
    assert_close(got, want, TOL[F32], str(used))


def test_a_row_does_not_depend_on_others() -> None:
    """Nor on how long they are."""
    call = arguments(Size(B=3, H=4))
    plan = planned(70, 3, 16, 2)
    want = latents.attend(**call, plan=plan)
    call["mask_BS"][0] = call["mask_BS"][2] = True
    got = latents.attend(**call, plan=plan)
    assert torch.equal(got[1], want[1]) and not torch.equal(got, want)


def test_plans_cover_the_slots() -> None:
    for batch, heads, slots in itertools.product(
        (1, 2, 8, 32, 64, 256),
        (1, 20, 64, 96, 128),
        (1, 17, 250, 512, 3000, 4096, 8192, 32768, MOST_SLOTS),
    ):
        plan = hopper_plan_for(Sizes(batch, heads, slots, 1152), H200)
        what = f"{batch} {heads} {slots}: {plan}"
        assert plan.splits * plan.tiles * plan.tile >= slots, what
        assert (plan.splits - 1) * plan.tile < slots, what  # none idle where all slots are filled
        assert 1 <= plan.splits <= MOST_SPLITS, what
        assert plan.tiles * plan.tile <= MOST_SPAN, what
        assert plan.heads == MOST_HEADS, what


def test_plans_are_those_that_were_fastest() -> None:
    """On an H100."""
    splits = {
        (1, 20, 512): 8, (1, 20, 4096): 64, (1, 20, 8192): 64, (8, 20, 512): 8,
        (8, 20, 4096): 16, (8, 20, 8192): 16, (32, 20, 512): 2, (32, 20, 4096): 4,
        (32, 20, 8192): 4, (1, 128, 512): 8, (1, 128, 4096): 32, (1, 128, 8192): 64,
        (8, 128, 4096): 8, (8, 128, 8192): 8, (32, 128, 512): 2, (32, 128, 4096): 2,
        (32, 128, 8192): 2,
    }  # fmt: skip
    plans = {size: hopper_plan_for(Sizes(*size, 1152), H200) for size in splits}
    assert {size: plan.splits for size, plan in plans.items()} == splits


def test_widths_that_it_takes() -> None:
    taken = [
        (R, D) for R in (64, 128, 256, 512) for D in (0, 16, 64, 128, 256)
        if fits_hopper(R, D, 2, H100_BYTES)
    ]  # fmt: skip
    narrow = [(R, D) for R in (128, 256) for D in (0, 16, 64, 128, 256)]
    assert taken == [*narrow, (512, 0), (512, 16), (512, 64)]


def test_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, latents of 16 bits that begin at a multiple of 16 bytes."""

    def kind(size: Size, dtype: torch.dtype, begin: int = 0) -> Any:
        call = arguments(size, dtype)
        moved = torch.empty(call["latents_BSR"].numel() + begin, dtype=dtype)[begin:]
        caches = moved.view_as(call["latents_BSR"]), call["rotated_BSD"]
        return type(latents._plan(call["q_BHR"], *caches, size.S))

    assert kind(Size(R=512, D=64), BF16) is LatentsPlan
    monkeypatch.setattr(latents, "is_hopper", lambda _: True)
    monkeypatch.setattr(latents, "shared_memory", lambda _: H100_BYTES)
    assert kind(Size(R=512, D=64), BF16) is kind(Size(R=256, D=64), F16) is HopperPlan
    assert kind(Size(R=512, D=64), F32) is kind(Size(R=64), BF16) is LatentsPlan
    assert kind(Size(R=512, D=64), BF16, begin=1) is LatentsPlan
