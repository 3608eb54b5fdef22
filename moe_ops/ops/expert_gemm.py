"""The expert matrix product: each routed row times the weight of its expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.shapes import FLOATS, check_devices, check_size, check_tensor
from moe_ops.spec import op


def check(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None = None,
    transposed: bool = False,
) -> None:
    """Raise ValueError or TypeError unless `expert_gemm` takes these arguments."""
    if (
        bias_EF is None
        and x_RD.dim() == 2
        and w_EFD.dim() == 3
        and ends_E.dim() == 1
        and x_RD.dtype is w_EFD.dtype
        and x_RD.dtype in FLOATS
        and ends_E.dtype is torch.int32
        and x_RD.shape[1] == w_EFD.shape[1 if transposed else 2]
        and w_EFD.shape[0] == ends_E.shape[0] > 0
        and x_RD.device == w_EFD.device == ends_E.device
    ):
        return  # the common call, accepted in half a microsecond
    check_tensor("x_RD", x_RD, 2, FLOATS)
    check_tensor("w_EFD", w_EFD, 3, (x_RD.dtype,))
    check_size("w_EFD", w_EFD, 1 if transposed else 2, x_RD.shape[1], "the width of x_RD")
    check_tensor("ends_E", ends_E, 1, (torch.int32,))
    E = w_EFD.shape[0]
    if E < 1:
        raise ValueError("w_EFD holds no expert")
    check_size("ends_E", ends_E, 0, E, "the experts of w_EFD")
    if bias_EF is not None:
        check_tensor("bias_EF", bias_EF, 2, FLOATS)
        check_size("bias_EF", bias_EF, 0, E, "the experts of w_EFD")
        check_size(
            "bias_EF",
            bias_EF,
            1,
            w_EFD.shape[2 if transposed else 1],
            "the rows of one expert's weight",
        )
    check_devices(x_RD, w_EFD=w_EFD, ends_E=ends_E, bias_EF=bias_EF)


@op(check=check)
def expert_gemm(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Multiply each row by its expert's weight: y_RF[r] = w[e(r)] @ x_RD[r] + bias[e(r)].

    e(r) is the expert whose rows include r: ends_E[e-1] <= r < ends_E[e], ends_E ascending.
    Products are summed in float32, the bias is added, and the sum is rounded once to x's dtype.
    (The backend `aten` rounds before it adds the bias and again after, as transformers does.) Rows
    from ends_E[-1] on belong to no expert; they cost no product and what y_RF holds there is
    unspecified.

    x_RD: float [R, D]; w_EFD: [E, F, D], or [E, D, F] if transposed, of x's dtype, any strides;
    ends_E: int32; bias_EF: float [E, F]. Raises ValueError or TypeError for wrong shapes, dtypes or
    devices.

    This definition gathers a weight for every row: exact, traceable, and meant for small R.
    """
    w = w_EFD.transpose(1, 2) if transposed else w_EFD
    expert_R = row_experts(ends_E, x_RD.shape[0])
    y_RF = (w[expert_R].float() * x_RD.float()[:, None, :]).sum(-1)
    if bias_EF is not None:
        y_RF = y_RF + bias_EF.float()[expert_R]
    return y_RF.to(x_RD.dtype)


def row_experts(ends_E: Tensor, R: int) -> Tensor:
    """The expert of each of R rows as int64; rows of no expert get the last expert's id."""
    rows_R = torch.arange(R, device=ends_E.device, dtype=ends_E.dtype)
    return torch.searchsorted(ends_E, rows_R, right=True).clamp(max=ends_E.shape[0] - 1)


expert_gemm.fake(fake_impls.expert_gemm)
