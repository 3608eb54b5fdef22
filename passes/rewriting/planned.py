"""Calls of ops with a plan: what it says, and which of them make the host wait for the device."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._ops import OpOverload

from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import require
from moe_ops.registry.invariance import PLANNED, Refused
from moe_ops.registry.ranges import parse_plan
from moe_ops.registry.spec import NAMESPACE, OPS, Op


def waiting(node: fx.Node) -> OpOverload | None:
    """The overload, for calls that no CUDA graph may hold, of the planned op that a node calls, if
    the host waits in one of its backends; or None."""
    op = _planned_op(node)
    if op is None or op.waiting is None or not _waits(op, node):
        return None
    return op.waiting


def plan_by(context: Context, op: Op, backend: str, call: Any) -> dict[str, str]:
    """The plan of a node whose calls are all run by a backend. Raises Mismatch where they have to
    be batch invariant, and it does not run them so."""
    if not context.options.batch_invariant:
        return {"plan": backend}
    said = op.backends[backend].arithmetic(call)
    require(not isinstance(said, Refused), f"{backend} of {op.name} is not batch invariant: {said}")
    return {"plan": f"{PLANNED}{backend}"}


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
