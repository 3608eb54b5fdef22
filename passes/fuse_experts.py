"""The stages of an expert layer, dispatch to combine, become one `experts`."""

from __future__ import annotations

from typing import Any

from torch import fx

from moe_ops.passes.context import Context
from moe_ops.passes.graph import (
    arg,
    call,
    each,
    insert,
    ops,
    output,
    require,
)


def fuse_experts(graph: fx.Graph, context: Context) -> int:
    """Turn dispatch, expert_gemm, activate, expert_gemm, combine into `experts`."""

    def fuse(combine: fx.Node) -> str:
        arguments = _read(combine)
        with graph.inserting_before(combine):
            experts = insert(graph, ops.experts.default, arguments, combine)
        combine.replace_all_uses_with(experts)
        graph.erase_node(combine)
        return "five stages"

    combines = graph.find_nodes(op="call_function", target=ops.combine.default)
    return each("fuse_experts", combines, fuse, context)


def _read(combine: fx.Node) -> tuple[Any, ...]:
    """The arguments of `experts`. Raises Mismatch unless the stages are those of one layer, and
    nobody else needs what they compute on the way.
    """
    second = _stage(arg(combine, "y_RD"), ops.expert_gemm.default, "the rows that are combined")
    activate = _stage(arg(second, "x_RD"), ops.activate.default, "the second product's input")
    first = _stage(arg(activate, "y_RF"), ops.expert_gemm.default, "the activation's input")
    x_RD, rows, ends = arg(first, "x_RD"), arg(combine, "rows_R"), arg(first, "ends_E")
    dispatch = ops.dispatch.default
    output(x_RD, 0, dispatch, what="the first product's input")
    output(rows, 1, dispatch, what="the rows' places")
    output(ends, 2, dispatch, what="the first product's ends")
    origin = x_RD.args[0]
    require(rows.args[0] is origin, "it combines the rows of another dispatch")
    require(ends.args[0] is origin, "the first product has the ends of another dispatch")
    require(arg(second, "ends_E") is ends, "the two products have different ends")
    for what, node in (("the dispatched rows", x_RD), ("the rows' places", rows)):
        require(len(node.users) == 1, f"{what} are also used elsewhere")
    require(len(ends.users) == 2, "the ends are also used elsewhere")
    for product in (first, second):
        require(arg(product, "x_format") == "", "the rows are quantised between the stages")
        require(arg(product, "out_dtype") == "", "a product gives another dtype")
    for name in ("transposed", "w_format"):
        require(arg(first, name) == arg(second, name), f"the two products differ in {name}")
    require(arg(origin, "num_experts") == _experts(first), "it dispatches to another number")
    activation = ("kind", "gated", "interleaved", "alpha", "limit", "up_shift")
    return (
        arg(origin, "x_TD"),
        arg(combine, "weights_TK"),
        arg(origin, "ids_TK"),
        arg(first, "w_EFD"),
        arg(second, "w_EFD"),
        arg(first, "bias_EF"),
        arg(second, "bias_EF"),
        arg(origin, "expert_map"),
        arg(first, "transposed"),
        *(arg(activate, name) for name in activation),
        arg(first, "w_scale_EFG"),
        arg(second, "w_scale_EFG"),
        arg(first, "w_zero_EFG"),
        arg(second, "w_zero_EFG"),
        arg(first, "global_scale_E"),
        arg(second, "global_scale_E"),
        None,  # x_scale
        None,  # h_scale
        arg(first, "w_format"),
    )


def _stage(node: Any, target: Any, what: str) -> fx.Node:
    found = call(node, target, what=what)
    require(len(found.users) == 1, f"{found} is also used elsewhere")
    return found


def _experts(product: fx.Node) -> Any:
    return arg(product, "w_EFD").meta["val"].shape[0]
