"""Shapes of `route`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def route(call: Any) -> tuple[Tensor, Tensor]:
    """[T, E] logits to ([T, top_k] weights in out_dtype, [T, top_k] int32 ids)."""
    logits_TE, shape = call.logits_TE, (call.logits_TE.shape[0], call.top_k)
    weights_TK = logits_TE.new_empty(shape, dtype=call.dtype)
    return weights_TK, logits_TE.new_empty(shape, dtype=torch.int32)
