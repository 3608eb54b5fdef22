"""Shapes of `dispatch_tokens`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dispatch_tokens(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows that arrive: of unknown number by exchange, else [ranks * rows] of them; or batches."""
    x_TD, weights_TK = call.x_TD, call.weights_TK
    scale, K, R = call.scale_TS, call.ids_TK.shape[1], ranks_of(call.group)
    exchanged = call.collective == "exchange"
    G: Any = R * call.rows
    N: Any = G if call.collective == "push" else 0
    if exchanged:
        context = torch.library.get_ctx()
        G, N = context.new_dynamic_size(), context.new_dynamic_size()
    S, scale_dtype = (0, torch.float32) if scale is None else (scale.shape[1], scale.dtype)
    at = (call.experts, G) if call.layout == "batched" else (G,)
    N = call.experts or N
    return (
        x_TD.new_empty((*at, x_TD.shape[1])),
        x_TD.new_empty((*at, S), dtype=scale_dtype),
        weights_TK.new_empty((G, K)),
        x_TD.new_empty((G, K), dtype=torch.int32),
        x_TD.new_empty((N,), dtype=torch.int32),
        torch.empty((2, R if exchanged else 0), dtype=torch.int64, device="cpu"),
    )


def ranks_of(group: str) -> int:
    """The size of a process group, given its name; "" is this process alone."""
    if not group:
        return 1
    from torch.distributed.distributed_c10d import _resolve_process_group

    name: Any = group  # torch has a type of its own for names
    return _resolve_process_group(name).size()
