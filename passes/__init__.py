"""Everything that touches a graph.

A pass is a function `(fx.Graph, Context) -> int`: it rewrites the graph in place, returns how many
rewrites it made, makes none when run again, and keeps no state. `PIPELINE` is their order.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from moe_ops.passes.context import Context

Pass = Callable[[fx.Graph, Context], int]

PIPELINE: tuple[Pass, ...] = ()
