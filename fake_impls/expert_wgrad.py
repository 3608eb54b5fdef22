"""Shapes of `expert_wgrad`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def expert_wgrad(call: Any) -> Tensor:
    """[R, M] and [R, N] rows of E experts to [E, M, N] of out_dtype."""
    sizes = (call.ends_E.shape[0], call.a_RM.shape[1], call.b_RN.shape[1])
    out: Tensor = call.a_RM.new_empty(sizes, dtype=call.dtype)
    return out
