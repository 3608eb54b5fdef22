"""Calls that between them launch every kernel of routers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.kernels.triton import routing
from moe_ops.ops.route import route
from moe_ops.ops.route_recording import route_recording
from moe_ops.ops.route_replaying import route_replaying
from tests.published_routers import Router, arguments


def routed(router: Router, dtype: torch.dtype, op: Any = route, **more: Tensor) -> None:
    """Launch a router."""
    given = arguments(router, dtype).items()
    call = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given}
    op.backends["triton"].run(op.call(**call, **more))


def recorded(router: Router, dtype: torch.dtype) -> None:
    """Launch a router that writes ids and weights to rings, and one that takes ids."""
    K = arguments(router, dtype)["top_k"]
    ids = torch.empty(9999, K, dtype=torch.int16, device="meta")
    at = torch.empty(1, dtype=torch.int64, device="meta")
    rings = {"ring_ids_SK": ids, "ring_weights_SK": ids.float(), "at": at}
    routed(router, dtype, route_recording, **rings)
    routed(router, dtype, route_replaying, given_ids_SK=ids)


def many_routed(case: Any) -> None:
    """Launch a router of so many tokens that it has another kernel."""
    logits = torch.empty(routing.MANY_TOKENS, case.E, dtype=torch.bfloat16, device="meta")
    route.backends["triton"].run(route.call(logits, case.K, renormalize=True))
