"""The routers of stock transformers models become calls of `route`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import SymInt, fx

from moe_ops.checks.shapes import DTYPES
from moe_ops.ops.route import route
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    FUNCTIONAL,
    RESHAPES,
    Mismatch,
    arg,
    aten,
    insert,
    is_call,
    layer_of,
    output,
    outputs,
    peel,
    prims,
    require,
    tensor,
    value,
)
from moe_ops.passes.routing.check import disagreement, program
from moe_ops.passes.routing.router import Routing, read, unscaled

RULE = "lift_router"
OUTSIDE = "what chooses the experts is not in this graph"
ops = torch.ops.moe_ops


def lift_router(graph: fx.Graph, context: Context) -> int:
    """Turn what computes the ids and weights of an expert layer into one call of `route`."""
    lifted, there = 0, set(graph.nodes)
    for ids_user, weights_user in list(_layers(graph)):
        ids, weights = _ids(ids_user), arg(weights_user, "weights_TK")
        ours = _routed(ids)
        if ours is not None:
            # Of one that was lifted for a layer before it is told already.
            lifted += _read_uncast(graph, ids_user, ids, ours) and ours in there
            continue
        try:
            require(peel(ids).op != "placeholder", OUTSIDE)
            weights = unscaled(weights)
            routing = read(ids, weights)
            _verify(routing, weights)
        except Mismatch as reason:
            context.refuse(RULE, weights_user.name, layer_of(weights_user), str(reason))
        else:
            name, layer = routing.topk.name, layer_of(routing.topk)
            _rewrite(graph, routing, (ids_user, ids), weights)
            context.rewrote(RULE, name, layer, _text(routing))
            lifted += 1
    return lifted


def _layers(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes that read the ids and the weights of an expert layer."""
    for combine in graph.find_nodes(op="call_function", target=ops.combine.default):
        try:
            rows = output(arg(combine, "rows_R"), 1, ops.dispatch.default, what="the rows")
        except Mismatch:
            reshaped = _by_choice(combine)
            if reshaped is not None:
                yield reshaped, combine
            continue
        yield rows, combine
    for whole in (ops.experts, ops.experts_over_ranks, ops.dispatch_tokens):
        for node in graph.find_nodes(op="call_function", target=whole.default):
            yield node, node


def _ids(user: fx.Node) -> Any:
    """The ids that such a node reads, as they are now: a router that is lifted gives others."""
    return user.args[0] if is_call(user, *RESHAPES) else arg(user, "ids_TK")


def _by_choice(combine: fx.Node) -> fx.Node | None:
    """What makes ids a column, where ranks add rows of single choices (`by_choice.py` of the
    ops)."""
    added = arg(combine, "y_RD")
    part: Any = added.args[0] if is_call(added, ops.sum_ranks.default) else None
    ids = arg(part, "ids_TK") if is_call(part, ops.experts.default) else None
    return ids if is_call(ids, *RESHAPES) else None


def _routed(ids: Any) -> fx.Node | None:
    """The ids of a router that is an op of ours, which these are but for casts and reshapes."""
    while is_call(ids, *RESHAPES, prims.convert_element_type.default):
        ids = ids.args[0]
    source: Any = ids.args[0] if ids.args else None
    if is_call(source, FUNCTIONAL):  # one that writes to rings
        routes = source.args[0] is ops.route_recording.default
    else:
        routes = is_call(source, ops.route.default, ops.route_replaying.default)
    return ids if routes else None


def _read_uncast(graph: fx.Graph, user: fx.Node, ids: fx.Node, ours: fx.Node) -> bool:
    """Have an op read ids as a router of ours gives them, in int32, where no more than their width
    was changed: transformers wants int64, and a cast is a launch. Returns whether it does."""
    if ids is ours or is_call(user, *RESHAPES) or tensor(ids).shape != tensor(ours).shape:
        return False
    user.replace_input_with(ids, ours)
    while ids is not ours and not ids.users:
        ids, unused = ids.args[0], ids  # type: ignore[assignment]
        graph.erase_node(unused)
    return True


def _verify(routing: Routing, weights: fx.Node) -> None:
    """Raise Mismatch unless the call can stand for the nodes."""
    tensors: dict[str, Any] = {name: tensor(node) for name, node in routing.leaves.items()}
    if "bias_E" in tensors:
        tensors["bias_E"] = tensors["bias_E"].flatten()
    require(tensor(weights).dtype in DTYPES.values(), f"its weights are {tensor(weights).dtype}")
    doubles = any(t.dtype is torch.float64 for t in tensors.values())
    require(not doubles, "it is computed in float64")
    call = route.call(**tensors, **routing.arguments)
    try:
        route.check(call)
    except (TypeError, ValueError) as error:
        raise Mismatch(str(error)) from error
    for leaf in routing.leaves.values():
        require(leaf < routing.topk, f"it reads {leaf}, which comes after the top-k")
    if not arg(routing.topk, "sorted"):
        _check_order(routing, weights)
    T = tensor(routing.ids).shape[0]
    found = program((routing.ids, routing.exact), routing.leaves, T)
    reason = disagreement(found, tuple(sorted(routing.arguments.items())))
    require(reason is None, f"checked with numbers, {reason}")


def _check_order(routing: Routing, weights: fx.Node) -> None:
    """Require that nobody reads values in the order of this top-k, which `route` may change."""
    region = _between((routing.ids, weights), routing.leaves.values())
    stack = [user for user in routing.topk.users if user.args[1] == 0]
    while stack:
        node = stack.pop()
        if node is not weights:
            outside = [user for user in node.users if user not in region]
            require(not outside, f"{node}, whose order is not defined, is also used elsewhere")
            stack.extend(node.users)


def _rewrite(
    graph: fx.Graph, routing: Routing, reads: tuple[fx.Node, fx.Node], weights: fx.Node
) -> None:
    """Put `route` before the top-k, and erase what nobody uses any more. reads: the node that reads
    the ids, which an op takes as they are now, and these."""
    topk, (ids_user, ids_TK) = routing.topk, reads
    region = _between((ids_TK, weights), routing.leaves.values())
    with graph.inserting_before(topk):
        call = insert(graph, ops.route.default, _arguments(graph, routing, weights), topk)
        new_weights, new_ids = outputs(graph, call)
        if not is_call(ids_user, *RESHAPES):  # whose result has the dtype of what it reads
            ids_user.replace_input_with(ids_TK, new_ids)
        weights.replace_all_uses_with(new_weights)
        if any(user not in region for user in routing.ids.users):
            as_before = (new_ids, tensor(routing.ids).dtype)
            ids = insert(graph, prims.convert_element_type.default, as_before, topk)
            routing.ids.replace_all_uses_with(ids, lambda user: user not in region)
        for node in sorted(region, reverse=True):
            if not node.users:
                graph.erase_node(node)


def _between(results: Iterable[fx.Node], leaves: Iterable[fx.Node]) -> set[fx.Node]:
    """The calls that the results are computed by from the leaves, besides those of sizes."""
    stop, found, stack = set(leaves), set(), list(results)
    while stack:
        node = stack.pop()
        if node in stop or node in found or node.op != "call_function":
            continue
        if not isinstance(value(node), SymInt):
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _arguments(graph: fx.Graph, routing: Routing, weights: fx.Node) -> tuple[Any, ...]:
    """The arguments of `route` by position; new nodes go to the graph's insertion point."""
    named: dict[str, Any] = routing.arguments | routing.leaves
    if routing.bias is not None and tensor(routing.bias).dim() == 2:
        flat = (routing.bias, [tensor(routing.bias).shape[1]])
        named["bias_E"] = insert(graph, aten.reshape.default, flat, routing.bias)
    dtype = tensor(weights).dtype
    named["out_dtype"] = next(name for name, known in DTYPES.items() if known is dtype)
    return route.arguments.in_order(named)


def _text(routing: Routing) -> str:
    named = [f"{name}={argument}" for name, argument in routing.arguments.items()]
    return ", ".join([*named, *(name for name in routing.leaves if name != "logits_TE")])
