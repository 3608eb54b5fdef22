"""Tokens are quantised before they are copied to their experts, not after: K times fewer rows."""

from __future__ import annotations

from torch import fx

from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    arg,
    aten,
    each,
    insert,
    ops,
    output,
    outputs,
    require,
    same,
    tensor,
)
from moe_ops.quant.formats import TENSOR, Format


def hoist_quantize(graph: fx.Graph, context: Context) -> int:
    """Turn `quantize` of dispatched rows into dispatch of quantised tokens and their scales."""

    def hoist(quantize: fx.Node) -> str:
        rows, format = arg(quantize, "x_RD"), arg(quantize, "format")
        dispatch = output(rows, 0, ops.dispatch.default, what="what is quantised")
        require(len(rows.users) == 1, "the dispatched rows are also used as they are")
        found, static = Format.of(format), arg(quantize, "scale")
        one_scale = found.group == TENSOR
        # The largest magnitude of the rows is that of the tokens only if all are dispatched.
        require(not one_scale or static is not None, "one scale is taken from all rows")
        of_rows = static is not None and not same(tensor(static).numel(), 1)
        require(not of_rows, "each row has a global scale of its own")
        K = tensor(arg(dispatch, "ids_TK")).shape[1]
        with graph.inserting_before(dispatch):
            of_tokens = (arg(dispatch, "x_TD"), format, static)
            early = insert(graph, ops.quantize.default, of_tokens, quantize)
            values_TD, scale_TG = outputs(graph, early)
            arguments = (values_TD, *dispatch.args[1:])
            routed = insert(graph, ops.dispatch.default, arguments, dispatch)
            values_RD, rows_R, ends_E = outputs(graph, routed)
            scale_RG = scale_TG
            if not one_scale:
                used = insert(graph, aten.clamp_min.default, (rows_R, 0), quantize)
                token = insert(
                    graph, aten.div.Tensor_mode, (used, K), quantize, {"rounding_mode": "floor"}
                )
                scale_RG = insert(graph, aten.index.Tensor, (scale_TG, [token]), quantize)
        _replace(graph, quantize, (values_RD, scale_RG))
        _replace(graph, dispatch, (None, rows_R, ends_E))
        return f"{format}, {K} rows a token"

    found = graph.find_nodes(op="call_function", target=ops.quantize.default)
    dispatched = [n for n in found if _is_dispatched(arg(n, "x_RD"))]
    return each("hoist_quantize", dispatched, hoist, context)


def _is_dispatched(rows: fx.Node) -> bool:
    return (
        rows.op == "call_function"
        and bool(rows.args)
        and (getattr(rows.args[0], "target", None) is ops.dispatch.default)
    )


def _replace(graph: fx.Graph, call: fx.Node, new: tuple[fx.Node | None, ...]) -> None:
    """Give the users of a call's outputs other nodes, and erase the call."""
    for user in list(call.users):
        replacement = new[user.args[1]]  # type: ignore[index]
        if replacement is not None:
            user.replace_all_uses_with(replacement)
        graph.erase_node(user)
    graph.erase_node(call)
