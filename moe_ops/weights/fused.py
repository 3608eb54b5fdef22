"""Shared experts that a checkpoint has side by side, as one expert of so many times the width."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.quant.formats import Format
from moe_ops.weights.layouts import Coding, Matrix


def taken_apart(
    t: Tensor, part: str, second: bool, shared: int, coding: Coding, format: Format | None
) -> list[Tensor]:
    """What of a tensor belongs to each of `shared` experts: rows of w1 and w3, columns of w2.

    part: what of the weight the tensor is, of the second one if `second`. coding and format: of
    the checkpoint and of the layer. Raises ValueError or TypeError for what has no such parts.
    """
    if part in ("shape", "g_idx") and t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"is {t.dtype}, but has to be int32 or int64")
    if part == "shape":
        if tuple(t.shape) != (2,):
            raise ValueError(f"expected the shape [2], found {list(t.shape)}")
        one = t.clone()
        one[int(second)] //= shared
        return [one] * shared
    if part == "g_idx":
        if t.dim() != 1 or not len(t) or len(t) % shared:
            raise ValueError(f"{list(t.shape)} are no columns of {shared} experts side by side")
        groups = (int(t.max()) + 1) // shared
        return [p - s * groups for s, p in enumerate(t.chunk(shared))] if second else [t] * shared
    if t.numel() == 1 or part in ("global_scale", "input") or (second and part == "bias"):
        return [t] * shared
    matrix = Matrix() if part == "bias" else coding.matrix(part, format)
    axis = (matrix.columns if second else matrix.rows).place
    # One column of scales is of whole rows, which have all experts' columns.
    whole = axis >= t.dim() or (second and t.shape[axis] == 1)
    if whole:
        return [t] * shared
    if t.shape[axis] % shared:
        raise ValueError(f"axis {axis} of {list(t.shape)} is not of {shared} experts side by side")
    return list(t.chunk(shared, axis))
