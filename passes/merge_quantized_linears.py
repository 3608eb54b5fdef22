"""Linear layers of one input whose weights are codes of one format become one call.

The layers of a model call their op one by one. One call is one launch for four weights in a step,
and puts the input in the order in which codes are decoded once for all of them.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    arg,
    each,
    insert,
    operand,
    ops,
    outputs,
    parameters_of,
    peel,
    require,
    tensor,
)

RULE = "merge_quantized_linears"
LISTS = ("weights", "scales", "zeros", "global_scales", "biases")
Key = tuple[fx.Node, int, str]  # what is multiplied, its columns, the format


def merge_quantized_linears(graph: fx.Graph, context: Context) -> int:
    """Turn the `quantized_linears` of one input and one format into one, on any device."""
    parameters = parameters_of(graph)
    groups: dict[Key, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=ops.quantized_linears.default):
        x = operand(node, 0)
        key = (peel(x), int(tensor(x).shape[1]), str(arg(node, "w_format")))
        groups.setdefault(key, []).append(node)
    firsts = {group[0]: group for group in groups.values() if len(group) > 1}
    return each(RULE, firsts, lambda node: _merge(graph, firsts[node], parameters), context)


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
