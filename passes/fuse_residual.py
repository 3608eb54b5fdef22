"""The sum behind the experts, with which a layer ends, becomes a part of their last launch.

Layers are compiled one by one, so that this sum has no norm behind it to become a part of. By
itself it is a launch, and what that waits for the one before.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from moe_ops.decode_ops.experts_onto import LAYER, experts_onto
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    RESHAPES,
    arg,
    aten,
    each,
    insert,
    is_call,
    ops,
    peel,
    require,
    tensor,
)
from moe_ops.registry.invariance import PLANNED
from moe_ops.registry.spec import REFERENCE

RULE = "fuse_residual"


def plans() -> set[str]:
    """The backends and paths that add to a residual, those of other packages by now among them."""
    return {*experts_onto.backends, *experts_onto.paths} - {REFERENCE}


def fuse_residual(graph: fx.Graph, context: Context) -> int:
    """Turn `experts` that run on kernels of ours, and a sum of their output with something else
    that is an output of the graph, into `experts_onto`. Inductor fuses other sums with what
    follows."""
    nodes = graph.find_nodes(op="call_function", target=ops.experts.planned)
    known = plans()
    sums = {
        n: last_sum(n)
        for n in nodes
        if arg(n, "plan").removeprefix(PLANNED).removeprefix(":") in known
    }
    found = {n: total for n, total in sums.items() if total is not None}
    return each(RULE, found, lambda node: _fuse(graph, node, found[node]), context)


def last_sum(experts: fx.Node) -> fx.Node | None:
    """The sum that alone reads what a node gives, and is read by nothing in the graph."""
    node = experts
    while len(node.users) == 1:
        (node,) = node.users
        if is_call(node, aten.add.Tensor):
            return node if {user.op for user in node.users} == {"output"} else None
        if not is_call(node, *RESHAPES):
            return None
    return None


def _fuse(graph: fx.Graph, experts: fx.Node, total: fx.Node) -> str:
    codes = arg(experts, "x_scale_TG") is not None
    require(not codes, "its tokens are codes, and `experts_onto` takes floats")
    terms = [term for term in total.args if peel(term) is not experts]
    require(len(terms) == 1 and not total.kwargs, "they are added to themselves, or scaled")
    out, whole = tensor(experts), tensor(total)
    residual = tensor(terms[0])
    require(
        (residual.shape, residual.dtype) == (whole.shape, whole.dtype) and whole.dtype is out.dtype,
        f"{residual.dtype} {list(residual.shape)} is added to {out.dtype} {list(whole.shape)}",
    )
    with graph.inserting_before(total):
        rows = _rows(graph, terms[0], total, list(out.shape))
        arguments = (rows, *(arg(experts, name) for name in LAYER))
        plan = {"plan": arg(experts, "plan")}
        fused = insert(graph, ops.experts_onto.planned, arguments, experts, plan)
        result = insert(graph, aten.reshape.default, (fused, list(whole.shape)), total)
    total.replace_all_uses_with(result)
    graph.erase_node(total)
    return f"{list(out.shape)} by {arg(experts, 'plan')}"


def _rows(graph: fx.Graph, residual: Any, total: fx.Node, shape: list[int]) -> fx.Node:
    """The residual as rows [T, D]. Of a sum that others read too Inductor would make one more in a
    launch of its own, unless a reader is known to want it in memory, as `as_strided` is."""
    if is_call(residual, aten.add.Tensor) and tensor(residual).is_contiguous():
        strides = [shape[1], 1]
        return insert(graph, aten.as_strided.default, (residual, shape, strides), total)
    return insert(graph, aten.reshape.default, (residual, shape), total)
