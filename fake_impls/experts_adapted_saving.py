"""Shapes of `experts_adapted_saving`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .experts_saving import experts_saving


def experts_adapted_saving(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `experts_saving` gives, and [R, r] rows between A and B for each of two weights."""
    out_TD, y_RF, rows_R, ends_E = experts_saving(call)
    u13_Rr, wu2_Rr = (y_RF.new_empty((y_RF.shape[0], r)) for r in call.adapter.ranks)
    return out_TD, y_RF, u13_Rr, wu2_Rr, rows_R, ends_E
