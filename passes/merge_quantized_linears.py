"""Linear layers of one input whose weights are codes of one format become one call, by a plan.

The layers of a model call their op one by one. One call is one launch for four weights in a step,
and puts the input in the order in which codes are decoded once for all of them. With a plan it
neither checks its arguments again nor asks backends.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall, quantized_linears
from moe_ops.passes.pick_backend import call_of, make_planned
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    arg,
    each,
    insert,
    layer_of,
    operand,
    ops,
    outputs,
    parameters_of,
    peel,
    require,
    tensor,
)
from moe_ops.planning.plan import written
from moe_ops.registry.invariance import PLANNED, invariant

RULE = "merge_quantized_linears"
LISTS = ("weights", "scales", "zeros", "global_scales", "biases")
Key = tuple[fx.Node, int, str]  # what is multiplied, its columns, the format


def merge_quantized_linears(graph: fx.Graph, context: Context) -> int:
    """Turn the `quantized_linears` of one input and one format into one, on any device, and give
    each call a plan."""
    parameters = parameters_of(graph)
    groups: dict[Key, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=ops.quantized_linears.default):
        x = operand(node, 0)
        key = (peel(x), int(tensor(x).shape[1]), str(arg(node, "w_format")))
        groups.setdefault(key, []).append(node)
    firsts = {group[0]: group for group in groups.values() if len(group) > 1}
    merged = each(RULE, firsts, lambda node: _merge(graph, firsts[node], parameters), context)
    left = graph.find_nodes(op="call_function", target=ops.quantized_linears.default)
    for node in left:
        with context.for_all_sizes():
            plan = plan_of(call_of(quantized_linears, node), context.options.batch_invariant)
        make_planned(graph, node, quantized_linears, plan)
        context.rewrote(RULE, node.name, layer_of(node), plan)
    return merged + len(left)


def plan_of(call: QuantizedLinearsCall, batch_invariant: bool = False) -> str:
    """The backends of a call, as a plan for any number of rows: those that do not refuse it, in the
    order in which they are asked, up to one that runs them all; if `batch_invariant`, those of one
    arithmetic, or NotImplementedError."""
    device, ranges = call.x_TK.device.type, []
    asked = quantized_linears.candidates(device)
    if batch_invariant:
        with invariant():
            asked = quantized_linears.invariant(device, call)
    for backend in asked:
        if backend.refusal(device, None, call) is None:
            most = backend.rows.possible
            ranges.append((None if most is None else most(call), backend.name))
            if most is None:
                break
    return f"{PLANNED if batch_invariant else ''}{written(ranges)}"


def _merge(graph: fx.Graph, group: list[fx.Node], parameters: set[fx.Node]) -> str:
    first = group[0]
    lists = [[t for node in group for t in arg(node, name)] for name in LISTS]
    # What else is given may be computed behind the first of them.
    others = [t for given in lists for t in given if t is not None and t not in parameters]
    require(not others, f"{others and others[0]} is no parameter")
    x, format = operand(first, 0), arg(first, "w_format")
    with graph.inserting_before(first):
        merged = insert(graph, ops.quantized_linears.default, (x, *lists, format), first)
        made = iter(outputs(graph, merged))
    for node in group:
        _replace(node, [next(made) for _ in arg(node, "weights")])
    for node in group:
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)
    return f"{len(lists[0])} of {list(tensor(x).shape)} in {format}"


def _replace(node: fx.Node, made: list[Any]) -> None:
    """Have the users of a call's results use others, which are made of the same."""
    for user in list(node.users):
        user.replace_all_uses_with(made[operand(user, 1)])
