"""Triton's kernels that place rows in batches, and sum what experts made of them: as the definition
does both; in Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from moe_ops.ranks import batches
from moe_ops.testing import DEVICE

triton_batches = pytest.importorskip(
    "moe_ops.kernels.triton.batches", reason="the kernels are Triton's"
)

E, K = 5, 3
ROWS = {"few": 4, "many": 9}
# What is made smaller: pairs up to which there is one launch, pairs that programs read at once.
LAUNCHES = {
    "one": {}, "one_by_blocks": {"AT_ONCE": 16}, "two": {"ONE_LAUNCH": 0},
    "two_by_blocks": {"ONE_LAUNCH": 0, "PAIRS": 16},
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def ids_of(G: int) -> torch.Tensor:
    """Rows of none, of experts that are not here, and of one expert twice."""
    ids_GK = torch.randint(-1, E + 1, (G, K), dtype=torch.int32, device=DEVICE)
    ids_GK[0], ids_GK[1] = -1, torch.tensor([2, 0, 2], dtype=torch.int32)
    return ids_GK


def make_smaller(sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in sizes.items():
        monkeypatch.setattr(triton_batches, name, size)


@pytest.mark.parametrize("smaller", (LAUNCHES["one"], LAUNCHES["two"]), ids=("one", "two"))
@pytest.mark.parametrize("G", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_placed(
    dtype: torch.dtype, G: int, smaller: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_smaller(smaller, monkeypatch)
    ids_GK = ids_of(G)
    x_GD = torch.randn(G, 24, device=DEVICE).to(dtype)
    for scale_GS in (torch.randn(G, 2, device=DEVICE), torch.empty(G, 0, device=DEVICE)):
        got = triton_batches.in_batches(x_GD, scale_GS, ids_GK, E)
        want = batches.in_batches(x_GD, scale_GS, ids_GK, E)
        assert torch.equal(got[2], want[2]) and torch.equal(got[3], want[3])
        assert bool((want[2][1, 0] == want[2][1, 2]) & (want[2][1, 0] >= 0))
        for g, w in zip(got[:2], want[:2], strict=True):
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            for e, count in enumerate(want[3].tolist()):
                assert torch.equal(g[e, :count].float(), w[e, :count].float())
                assert bool(g[e, count:].float().isnan().all()), "is not written"


@pytest.mark.parametrize("smaller", LAUNCHES.values(), ids=LAUNCHES)
def test_more_pairs_than_at_once(smaller: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    make_smaller(smaller, monkeypatch)
    ids_GK, x_GD = ids_of(20), torch.randn(20, 4, device=DEVICE)
    scale_GS = torch.empty(20, 0, device=DEVICE)
    got = triton_batches.in_batches(x_GD, scale_GS, ids_GK, E)
    want = batches.in_batches(x_GD, scale_GS, ids_GK, E)
    assert torch.equal(got[2], want[2]) and torch.equal(got[3], want[3])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rows_are_summed(dtype: torch.dtype) -> None:
    """Slots past a count are not read, nor are weights of pairs that are not here."""
    ids_GK = ids_of(9)
    slot_GK, counts_E = batches.slots_of(ids_GK, E)
    y_EMD = torch.randn(E, 9, 24, device=DEVICE).to(dtype)
    y_EMD[torch.arange(9, device=DEVICE) >= counts_E[:, None]] = float("nan")
    weights_GK = torch.rand(9, K, device=DEVICE).masked_fill(slot_GK < 0, float("nan"))
    y_GD, served_G = triton_batches.from_batches(y_EMD, weights_GK, slot_GK)
    want = batches.from_batches(y_EMD, weights_GK, slot_GK)
    torch.testing.assert_close(
        y_GD, want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6
    )
    assert torch.equal(served_G, batches.served(slot_GK))
