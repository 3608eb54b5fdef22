"""The gradient of expert weights: for each expert, the product of its rows of two matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import (
    DTYPES,
    check_choice,
    check_devices,
    check_float,
    check_tensor,
    wide,
)
from moe_ops.ops.expert_gemm import checked_ends, row_experts, used_rows, warn_of_size
from moe_ops.registry.spec import op
from moe_ops.registry.watched import readable


@dataclass(slots=True)
class ExpertWgradCall:
    """The arguments of `expert_wgrad`."""

    a_RM: Tensor
    b_RN: Tensor
    ends_E: Tensor
    a_rows_R: Tensor | None = None
    b_rows_R: Tensor | None = None
    out_dtype: str = ""

    @property
    def rows(self) -> int:
        """R, the rows that are multiplied."""
        a_rows_R, b_rows_R = self.a_rows_R, self.b_rows_R
        if a_rows_R is not None:
            return a_rows_R.shape[0]
        return self.a_RM.shape[0] if b_rows_R is None else b_rows_R.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return DTYPES[self.out_dtype] if self.out_dtype else self.a_RM.dtype


def check(call: ExpertWgradCall) -> None:
    """Raise ValueError or TypeError unless `expert_wgrad` takes these arguments."""
    a_RM, b_RN, ends_E = call.a_RM, call.b_RN, call.ends_E
    check_float("a_RM", a_RM, 2)
    check_tensor("b_RN", b_RN, 2, (a_RM.dtype,), "convert one to the dtype of the other")
    check_tensor("ends_E", ends_E, 1, (torch.int32,))
    if ends_E.shape[0] < 1:
        raise ValueError("ends_E is empty; give one past the last row of one expert or more")
    check_choice("out_dtype", call.out_dtype, ("", *DTYPES))
    counts = {}
    for name, t, rows_name, rows_R in (
        ("a_RM", a_RM, "a_rows_R", call.a_rows_R),
        ("b_RN", b_RN, "b_rows_R", call.b_rows_R),
    ):
        if rows_R is not None:
            check_tensor(rows_name, rows_R, 1, (torch.int32,))
            counts[rows_name] = rows_R.shape[0]
        else:
            counts[name] = t.shape[0]
    (a, a_count), (b, b_count) = counts.items()
    if a_count != b_count:
        raise ValueError(
            f"{a} and {b} must have as many rows, got {a_count} and {b_count}; a row of one is "
            "multiplied by the row of the other"
        )
    check_devices(a_RM, b_RN=b_RN, ends_E=ends_E, a_rows_R=call.a_rows_R, b_rows_R=call.b_rows_R)


@op(check=check)
def expert_wgrad(call: ExpertWgradCall) -> Tensor:
    """Sum the outer products of each expert's rows: w_EMN[e] = sum over r of e: a[r] b[r]^T.

    The rows of expert e are those from ends_E[e-1] to ends_E[e], as `dispatch` gives them: with
    a_RM the gradients of an expert product's result and b_RN its input, w_EMN is the gradient of
    its weight. An expert without rows has zeros. Rows from ends_E[-1] on are not read: they may
    hold NaN.

    With a_rows_R the row r of a is a_RM[a_rows_R[r]], so that tokens need not be copied once for
    each of their experts; b_rows_R is the same for b. Of unused rows these may hold anything.

    a_RM: float [R, M], or [any, M] with a_rows_R; b_RN: [R, N] in a's dtype, likewise; ends_E:
    int32 [E]; a_rows_R, b_rows_R: int32 [R]. Sums are taken in float32. The result [E, M, N] has
    a's dtype, or the one named by out_dtype.

    Raises ValueError or TypeError for wrong shapes, dtypes or devices, and ValueError on a CPU for
    names that name no row, but of unused rows.

    This definition makes an outer product of every row: exact, traceable, and meant for small R.
    """
    R, E = call.rows, call.ends_E.shape[0]
    if readable(call.ends_E):
        check_names(call, checked_ends(call.ends_E, R)[-1])
    used_R = used_rows(call.ends_E, R)
    a_RM = wide(rows_of(call.a_RM, call.a_rows_R, used_R))
    b_RN = wide(rows_of(call.b_RN, call.b_rows_R, used_R))
    warn_of_size("expert_wgrad", R * a_RM.shape[1] * b_RN.shape[1])
    w_EMN = a_RM.new_zeros(E, a_RM.shape[1], b_RN.shape[1])
    outer_RMN = a_RM[:, :, None] * b_RN[:, None, :]
    return w_EMN.index_add(0, row_experts(call.ends_E, R), outer_RMN).to(call.dtype)


def check_names(call: ExpertWgradCall, used: int) -> None:
    """Raise ValueError if one of the first names, which belong to used rows, names none. Names on
    a GPU are not read, as that would wait for it."""
    for what, name, t, rows_R in (
        ("a_RM", "a_rows_R", call.a_RM, call.a_rows_R),
        ("b_RN", "b_rows_R", call.b_RN, call.b_rows_R),
    ):
        if rows_R is None or not rows_R.is_cpu or used == 0:
            continue
        low, high = (int(end) for end in rows_R[:used].aminmax())
        if low < 0 or high >= t.shape[0]:
            raise ValueError(
                f"{name} names rows {low} to {high} of {what}, which has {t.shape[0]}; name rows "
                "that there are, but where ends_E leaves a row out"
            )


def rows_of(t_RN: Tensor, rows_R: Tensor | None, used_R: Tensor) -> Tensor:
    """The rows that are named, or all, with zeros in those that are not used, whose values and
    names may be anything."""
    if rows_R is not None:
        t_RN = t_RN[torch.where(used_R, rows_R, 0)]
    return torch.where(used_R[:, None], t_RN, 0)


expert_wgrad.fake(fake_impls.expert_wgrad)
