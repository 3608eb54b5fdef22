"""Shared experts beside the exchange of tokens: what a layer over ranks takes with and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops.bench.inputs import make_routed
from moe_ops.layer import MoELayer
from moe_ops.layer.parts import REPLICATED
from moe_ops.parallel.config import AUTO, ParallelConfig
from moe_ops.testing import Case

ROUTED, SHARED, BOTH = "routed", "shared", "both"
WAYS = (ROUTED, SHARED, BOTH)


class SharedExpert(nn.Module):
    """One more expert of the same width, which every token visits."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        given: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "device": device}
        self.gate_up = nn.Linear(case.D, 2 * case.I, **given)
        self.down = nn.Linear(case.I, case.D, **given)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD).chunk(2, dim=-1)
        out_TD: Tensor = self.down(F.silu(gate_TI) * up_TI)
        return out_TD


def call(case: Case, T: int, way: str, device: torch.device, routing: str) -> Callable[[], Tensor]:
    """The routed experts over all ranks, the shared expert of this rank, or a layer of both, whose
    shared expert runs while tokens are exchanged; on T tokens of this rank's own."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    routed = make_routed(case, T, routing, torch.bfloat16, generator)
    shared = SharedExpert(case, device)
    if way == SHARED:
        return lambda: shared(routed.x_TD)
    layer = _layer(case, T, None if way == ROUTED else shared, device)
    return lambda: layer(routed.x_TD, routed.logits_TE, rows=T)


def _layer(case: Case, T: int, shared: nn.Module | None, device: torch.device) -> MoELayer:
    assert dist.group.WORLD is not None
    layer = MoELayer(
        num_experts=case.E,
        top_k=case.K,
        hidden_size=case.D,
        intermediate_size=case.I,
        parallel=ParallelConfig.of(
            dp=dist.get_world_size(), dp_rank=dist.get_rank(), expert_parallel=True, collective=AUTO
        ),
        tokens="own",
        group=dist.group.WORLD.group_name,
        max_num_tokens=T,
        dtype=torch.bfloat16,
        device=device,
        shared_experts=0 if shared is None else shared,
        shared_reduction=REPLICATED,
    )
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.02)
    return layer
