"""Everything that touches a graph.

A pass is a function `(fx.Graph, Context) -> int`: it rewrites the graph in place, returns how many
rewrites it made, makes none when run again, and keeps no state. `PIPELINE` is their order.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from moe_ops.passes.drop_duplicate_quantize import drop_duplicate_quantize
from moe_ops.passes.fuse_experts import fuse_experts
from moe_ops.passes.fuse_moe import fuse_moe
from moe_ops.passes.fuse_norm import fuse_norm
from moe_ops.passes.fuse_residual import fuse_residual
from moe_ops.passes.fuse_rope import fuse_rope
from moe_ops.passes.hoist_quantize import hoist_quantize
from moe_ops.passes.invariant_linears import invariant_linears
from moe_ops.passes.lift_batched_mm import lift_batched_mm
from moe_ops.passes.lift_grouped_mm import lift_grouped_mm
from moe_ops.passes.lift_router import lift_router
from moe_ops.passes.lower import lower
from moe_ops.passes.merge_linears import merge_linears
from moe_ops.passes.merge_quantized_linears import merge_quantized_linears
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.run_beside import run_beside

Pass = Callable[[fx.Graph, Context], int]

PIPELINE: tuple[Pass, ...] = (
    lift_grouped_mm,
    lift_batched_mm,
    lift_router,
    hoist_quantize,
    drop_duplicate_quantize,
    fuse_experts,
    fuse_moe,
    invariant_linears,
    pick_backend,
    lower,
    run_beside,
    merge_linears,
    merge_quantized_linears,
    fuse_norm,
    fuse_rope,
    fuse_residual,
)
