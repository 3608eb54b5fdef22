"""Which ops Inductor leaves outside of its own CUDA graphs: those in which the host waits for the
device. It takes a graph apart around an op whose overload has a tag that says so, so such calls get
that overload; others of the same op, which can be captured, stay as they are."""

from __future__ import annotations

from torch import fx

from moe_ops.passes.rewriting.planned import waiting


def leave_outside(graph: fx.Graph) -> int:
    """Have no CUDA graph hold the planned ops of a graph in one of whose backends the host waits.
    Returns how many these are."""
    count = 0
    for node in graph.nodes:
        overload = waiting(node)
        if overload is not None:
            node.target = overload
            count += 1
    return count
