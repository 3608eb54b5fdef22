"""Names of rows that `expert_wgrad` and `expert_wgrad_onto` read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moe_ops

M, N, R = 3, 5, 4
BACKENDS = ("aten", "reference")


def given(rows: int, names: list[int], last: int = R) -> tuple[Tensor, ...]:
    """Rows of a, so many of b with names of them, and ends of two experts."""
    ends_E = torch.tensor([1, last], dtype=torch.int32)
    return torch.randn(R, M), torch.randn(rows, N), ends_E, torch.tensor(names, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "names", "said"),
    [(0, [0] * R, "0 to 0 of b_RN, which has 0"), (3, [2, 0, 3, 1], "0 to 3 of b_RN, which has 3"),
     (3, [2, -1, 0, 1], "-1 to 2 of b_RN, which has 3")],
    ids=["no_rows", "past", "negative"],
)  # fmt: skip
def test_names_that_are_no_rows_are_refused(
    rows: int, names: list[int], said: str, backend: str
) -> None:
    a_RM, b_RN, ends_E, rows_R = given(rows, names)
    main_grad = torch.ones(2, M, N)
    with moe_ops.using(backend, "expert_wgrad", "expert_wgrad_onto"):
        with pytest.raises(ValueError, match=f"b_rows_R names rows {said}"):
            moe_ops.expert_wgrad(a_RM, b_RN, ends_E, None, rows_R)
        with pytest.raises(ValueError, match=f"b_rows_R names rows {said}"):
            moe_ops.expert_wgrad_onto(a_RM, b_RN, ends_E, main_grad, None, rows_R)
    assert bool((main_grad == 1).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_of_unused_rows_may_be_anything(backend: str) -> None:
    a_RM, b_RN, ends_E, rows_R = given(3, [2, 0, -7, 99], last=2)
    with moe_ops.using(backend, "expert_wgrad"):
        got = moe_ops.expert_wgrad(a_RM, b_RN, ends_E, None, rows_R)
    want = torch.stack([torch.outer(a_RM[0], b_RN[2]), torch.outer(a_RM[1], b_RN[0])])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
