"""Sorting on the device against `dispatch`, in one launch and in three."""

import pytest
import torch

from moe_ops import dispatch
from moe_ops.testing import DEVICE
from tests.chosen import in_turn

pytest.importorskip("triton", reason="the kernels are Triton's")


@in_turn(
    pytest.mark.parametrize("one_launch", [True, False], ids=["one", "three"]),
    pytest.mark.parametrize("mapped", [False, True], ids=["all", "mapped"]),
    pytest.mark.parametrize(("T", "E", "K"), [(1, 4, 2), (13, 5, 3), (70, 17, 4), (9, 1, 1)]),
)
def test_rows_are_those_of_dispatch(
    T: int, E: int, K: int, mapped: bool, one_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_ops.kernels.triton.experts.schedule import sort

    if not one_launch:
        monkeypatch.setattr(sort, "ONE_LAUNCH", 0)
        monkeypatch.setattr(sort, "CHUNK", 16)
        monkeypatch.setattr(sort, "CHUNKS_AT_ONCE", 4)
    ids = torch.randint(-1, E + 2, (T, K), device=DEVICE)
    expert_map = torch.randperm(E + 1, device=DEVICE) - 1 if mapped else None
    rows, inverse, ends = sort.sort_pairs(ids, E, expert_map)
    x = torch.zeros(T, 1, device=DEVICE)
    _, want_rows, want_ends = dispatch.reference(x, ids, E, expert_map)
    assert torch.equal(ends, want_ends)
    assert torch.equal(rows, want_rows)
    for row, pair in enumerate(rows.tolist()):
        assert pair == -1 or int(inverse[pair]) == row
    assert int((inverse >= 0).sum()) == int(want_ends[-1])
    assert int(inverse.min()) >= -1


def test_all_pairs_on_one_expert_keep_their_order() -> None:
    from moe_ops.kernels.triton.experts.schedule import sort

    rows, inverse, ends = sort.sort_pairs(torch.full((5, 2), 3, device=DEVICE), 6, None)
    assert rows.tolist() == inverse.tolist() == list(range(10))
    assert ends.tolist() == [0, 0, 0, 10, 10, 10]
