"""A call of experts on floats, of which nothing is there but shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.ops.experts import ExpertsCall


def layer_call(
    case: Any, T: int, full: bool, dtype: torch.dtype = torch.bfloat16, transposed: bool = False,
    **activation: Any,
) -> ExpertsCall:  # fmt: skip
    """`full`: with biases, an expert map and ids of 64 bits."""
    F = 2 * case.I if activation.get("gated", True) else case.I

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def weight(rows: int, columns: int) -> Tensor:
        return empty(case.E, *((columns, rows) if transposed else (rows, columns)))

    return ExpertsCall(
        x_TD=empty(T, case.D),
        weights_TK=empty(T, case.K, dtype=torch.float32),
        ids_TK=empty(T, case.K, dtype=torch.int64 if full else torch.int32),
        w13_EFD=weight(F, case.D),
        w2_EDI=weight(case.D, case.I),
        b13_EF=empty(case.E, F) if full else None,
        b2_ED=empty(case.E, case.D) if full else None,
        expert_map=empty(2 * case.E, dtype=torch.int32) if full else None,
        transposed=transposed,
        **activation,
    )
