"""Shared experts that a checkpoint has side by side, as one expert of so many times the width."""

from __future__ import annotations

from torch import Tensor

from moe_ops.quant.formats import Format
from moe_ops.weights.layouts import Coding, Matrix


def taken_apart(
    t: Tensor, part: str, second: bool, shared: int, coding: Coding, format: Format | None
) -> list[Tensor]:
    """What of a tensor belongs to each of `shared` experts: rows of w1 and w3, columns of w2.

    part: what of the weight the tensor is, of the second one if `second`. coding and format: of
    the checkpoint and of the layer.
    """
    if part == "shape":
        one = t.clone()
        one[int(second)] //= shared
        return [one] * shared
    if part == "g_idx":
        groups = (int(t.max()) + 1) // shared
        return [p - s * groups for s, p in enumerate(t.chunk(shared))] if second else [t] * shared
    if t.numel() == 1 or part in ("global_scale", "input") or (second and part == "bias"):
        return [t] * shared
    matrix = Matrix() if part == "bias" else coding.matrix(part, format)
    axis = (matrix.columns if second else matrix.rows).place
    # One column of scales is of whole rows, which have all experts' columns.
    whole = axis >= t.dim() or (second and t.shape[axis] == 1)
    return [t] * shared if whole else list(t.chunk(shared, axis))
