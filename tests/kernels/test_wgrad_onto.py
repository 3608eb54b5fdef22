"""`expert_wgrad_onto` by its Triton kernel, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import expert_wgrad_onto
from moe_ops.conformance import Only, examine
from moe_ops.conformance.memory import surrounded
from moe_ops.kernels.triton.wgrad import Tiles, wgrad, wgrad_onto
from moe_ops.testing import BF16, CASES, DEVICE, F16, F32
from tests.kernels.sampled import anywhere, cases, hold

HERE = torch.device(DEVICE)
BY_NAME = {case.name: case for case in CASES}
# The interpreter multiplies no bfloat16.
DTYPES = (F32, F16, BF16) if DEVICE == "cuda" else (F32, F16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
QUICK = ("odd_unaligned", "one_token", "no_tokens", "one_expert")
SMALL = Tiles(block_m=16, block_n=16, block_r=16, warps=4, stages=2)
COUNTS = (5, 0, 33, 16, 1)  # rows of each expert


@each_dtype
@pytest.mark.parametrize("case", cases(QUICK))
def test_samples(case: str, dtype: torch.dtype) -> None:
    assert hold(expert_wgrad_onto, BY_NAME[case], dtype) == {}


@pytest.mark.slow
def test_the_kit_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with anywhere(monkeypatch, expert_wgrad_onto):
        for sample in ("odd_unaligned/float16", "one_token/float32"):
            only = Only(sample=sample)
            report = examine(expert_wgrad_onto, "triton", only=only, device=DEVICE)
            assert report.sound, str(report)


@each_dtype
@pytest.mark.parametrize(("M", "N"), [(33, 17), (200, 40), (17, 300), (130, 1)])
@pytest.mark.parametrize("tiles", [SMALL, None], ids=["small", "table"])
def test_calls_give_the_bits_of_results_that_are_added_in_turn(
    M: int, N: int, tiles: Tiles | None, dtype: torch.dtype
) -> None:
    """Every tile once, whose memory nothing around it is written to."""
    ends = torch.tensor(COUNTS).cumsum(0).to(HERE, torch.int32)
    got = surrounded(torch.randn(len(COUNTS), M, N), HERE)
    want = got.clone()
    for _ in range(3):
        a, b = (torch.randn(sum(COUNTS), n, device=HERE).to(dtype) for n in (M, N))
        wgrad_onto(a, b, ends, None, None, got, tiles)
        want += wgrad(a, b, ends, None, None, F32, tiles=tiles)
    assert torch.equal(got, want)
    around = torch.empty(0, device=HERE).set_(got.untyped_storage())
    assert int(around.isfinite().sum()) == got.numel()


@pytest.mark.parametrize("ends", [[-9, 20, 99], [2**31 - 1, 20, 50], [20, 5, 50]])
def test_wrong_ends_read_no_row_outside(ends: list[int]) -> None:
    """What lies around the rows is NaN."""
    a, b = (surrounded(torch.randn(50, n), HERE) for n in (33, 17))
    got = torch.zeros(3, 33, 17, device=HERE)
    wgrad_onto(a, b, torch.tensor(ends, dtype=torch.int32, device=HERE), None, None, got)
    assert bool(got.isfinite().all())
