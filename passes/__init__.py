"""Everything that touches a graph.

A pass is a function `fx.Graph -> int`: it rewrites the graph in place, returns how many rewrites it
made, makes none when run again, and keeps no state. `PIPELINE` is their order.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

Pass = Callable[[fx.Graph], int]

PIPELINE: tuple[Pass, ...] = ()
