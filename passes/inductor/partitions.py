"""Which ops Inductor leaves outside of its own CUDA graphs: those in which the host waits for the
device. It takes a graph apart around an op whose overload has a tag that says so, so such calls get
that overload; others of the same op, which can be captured, stay as they are."""

from __future__ import annotations

from typing import Any

from torch import fx

from moe_ops.registry.ranges import parse_plan
from moe_ops.registry.spec import NAMESPACE, OPS, Op


def leave_outside(graph: fx.Graph) -> int:
    """Have no CUDA graph hold the planned ops of a graph in one of whose backends the host waits.
    Returns how many these are."""
    count = 0
    for node in graph.nodes:
        op = _planned_op(node)
        if op is not None and op.waiting is not None and _waits(op, node):
            node.target = op.waiting
            count += 1
    return count


def _planned_op(node: fx.Node) -> Op | None:
    if node.op != "call_function" or getattr(node.target, "namespace", "") != NAMESPACE:
        return None
    op = OPS.get(node.target._schema.name.partition("::")[2])  # type: ignore[union-attr]
    return op if op is not None and node.target is op.planned else None


def _waits(op: Op, node: fx.Node) -> bool:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    plan: Any = kwargs["plan"]
    call = op.call(*args, **{name: x for name, x in kwargs.items() if name != "plan"})
    backends = (op.named(name) for _, name in parse_plan(plan))
    return any(backend is not None and backend.waits(call) for backend in backends)
