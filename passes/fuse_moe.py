"""`route` and the `experts` that it chooses become one `moe`."""

from __future__ import annotations

from typing import Any

from torch import fx

from moe_ops.checks.shapes import INDICES
from moe_ops.ops.moe import MoeCall
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    arg,
    each,
    insert,
    is_call,
    ops,
    output,
    prims,
    require,
    same,
    tensor,
)


def fuse_moe(graph: fx.Graph, context: Context) -> int:
    """Turn a `route` whose results one `experts` alone reads, and that `experts`, into `moe`."""

    def fuse(experts: fx.Node) -> str:
        arguments = _read(experts)
        with graph.inserting_before(experts):
            moe = insert(graph, ops.moe.default, arguments, experts)
        experts.replace_all_uses_with(moe)
        graph.erase_node(experts)
        return "route and experts"

    found = graph.find_nodes(op="call_function", target=ops.experts.default)
    return each("fuse_moe", found, fuse, context)


def _read(experts: fx.Node) -> tuple[Any, ...]:
    """The arguments of `moe`. Raises Mismatch if the routing is another's or read by others."""
    require(arg(experts, "x_scale_TG") is None, "its tokens are codes, and `moe` takes floats")
    weights, ids = arg(experts, "weights_TK"), _as_chosen(arg(experts, "ids_TK"))
    route = output(weights, 0, ops.route.default, what="the weights")
    output(ids, 1, ops.route.default, what="the ids")
    require(ids.args[0] is route, "weights and ids come from two routings")
    for what, node in (("weights", weights), ("ids", ids)):
        require(len(node.users) == 1, f"the {what} are also used elsewhere")
    logits, x = tensor(arg(route, "logits_TE")), tensor(arg(experts, "x_TD"))
    require(same(logits.shape[0], x.shape[0]), "the logits are those of other tokens")
    if arg(experts, "expert_map") is None:
        E = tensor(arg(experts, "w13_EFD")).shape[0]
        require(same(logits.shape[1], E), "the routing knows another number of experts")
    parts = {"routing": route, "layer": experts}
    paths = (path.partition(".") for path in MoeCall.FLAT.values())
    return tuple(arg(parts[part], name) for part, _, name in paths)


def _as_chosen(ids: Any) -> Any:
    """Ids before they became integers of another width, as transformers' routers return them."""
    while is_call(ids, prims.convert_element_type.default) and len(ids.users) == 1:
        (source,) = ids.all_input_nodes
        if not {tensor(n).dtype for n in (ids, source)} <= {*INDICES}:
            break
        ids = source
    return ids
