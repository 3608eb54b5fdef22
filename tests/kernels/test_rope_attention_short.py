"""The attention over a short cache that registers hold, by torch: see `gluon_in_torch.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.decode import rope_attention as kernels
from moe_ops.testing import BF16, DEVICE, F16, Tol, assert_close
from tests.chosen import in_turn
from tests.kernels import gluon_in_torch
from tests.kernels.test_rope_attention import TOL, definition, tensors

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")

# Sequences, heads of q and of the cache, slots, sizes of heads of keys and of values.
SIZES = ((1, 8, 1, 256, 128, 128), (3, 10, 2, 130, 64, 128), (2, 12, 1, 40, 128, 64),
         (1, 4, 4, 17, 64, 64), (1, 8, 1, 300, 128, 64), (1, 10, 1, 512, 64, 64))  # fmt: skip
WIDE = Tol(2.5e-2, "bfloat16, rounded up to three times")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(kernels, "is_hopper", lambda _: True)
    names, merge = gluon_in_torch.take_over(kernels, monkeypatch), kernels.one_query.launch

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__)
        merge(kernel, *args, **options)

    monkeypatch.setattr(kernels.one_query, "launch", noted)
    return names


@in_turn(
    pytest.mark.parametrize("halves", [False, True]),
    pytest.mark.parametrize("gains", [False, True]),
    pytest.mark.parametrize("slot", [-5, 0, 1, -1]),
    pytest.mark.parametrize("size", SIZES, ids=str),
    pytest.mark.parametrize("dtype", [F16, BF16], ids=str),
)
def test_against_float64(
    dtype: torch.dtype, size: tuple[int, ...], slot: int, gains: bool, halves: bool,
    launched: list[str],
) -> None:  # fmt: skip
    given = tensors(size, dtype, gains=gains, halves=halves, sinks=gains, slot=slot)
    want = definition(given)
    before = given["keys_BNSD"].clone(), given["values_BNSD"].clone()
    got = kernels.run_short(**given)
    merges = ["one_query_merge"] if size[3] > kernels.ALONE else []
    assert launched == ["rope_attention_short", *merges]
    slot, tol = int(given["slot"]), TOL if dtype is F16 else WIDE
    assert_close(got.float(), want[0].float(), tol)
    for name, old, exact in zip(("keys_BNSD", "values_BNSD"), before, want[1:], strict=True):
        assert_close(given[name][:, :, slot].float(), exact[:, :, slot].float(), tol)
        assert torch.equal(given[name][:, :, :slot], old[:, :, :slot])
        assert bool(given[name][:, :, slot + 1 :].isnan().all())


def test_sequences_stay_apart() -> None:
    given = tensors((3, 8, 2, 40, 64, 64))
    want = kernels.run_short(**given)
    given["q_BHD"][1] = float("nan")
    given["keys_BNSD"][1] = float("nan")
    got = kernels.run_short(**given)
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and bool(got[1].isnan().all())


def test_which_caches_registers_hold(launched: list[str]) -> None:
    merged = ["rope_attention_short", "one_query_merge"]
    turned_before = ["one_query_kernel", "one_query_merge"]
    for size, expected in (
        ((1, 8, 1, 256, 128, 128), ["rope_attention_short"]),
        ((2, 8, 1, 256, 64, 64), ["rope_attention_kernel"]),
        ((2, 8, 1, 257, 64, 64), ["rope_attention_kernel"]),
        ((1, 8, 1, 257, 64, 64), merged),
        ((1, 4, 1, 4096, 64, 64), merged),
        ((1, 4, 1, 4097, 64, 64), turned_before),
        ((2, 8, 1, 512, 128, 128), turned_before),
        ((1, 17, 1, 40, 64, 64), ["rope_attention_kernel"]),
        ((1, 8, 1, 40, 32, 64), ["rope_attention_kernel"]),
    ):
        launched.clear()
        kernels.run(**tensors(size))
        assert launched == expected
