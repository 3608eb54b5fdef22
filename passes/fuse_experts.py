"""The stages of an expert layer, dispatch to combine, become one `experts`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import fx

from moe_ops.ops.activate import Activation
from moe_ops.ops.experts import experts
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    arg,
    call,
    each,
    insert,
    ops,
    output,
    require,
)

# Which stage has which argument of `experts`, and what it calls it. The others have their defaults:
# they quantise inputs, or are for weights in a backend's own layout.
HELD = {
    "x_TD": "dispatch.x_TD",
    "weights_TK": "combine.weights_TK",
    "ids_TK": "dispatch.ids_TK",
    "w13_EFD": "first.w_EFD",
    "w2_EDI": "second.w_EFD",
    "b13_EF": "first.bias_EF",
    "b2_ED": "second.bias_EF",
    "expert_map": "dispatch.expert_map",
    "transposed": "first.transposed",
    **{field.name: f"activate.{field.name}" for field in fields(Activation)},
    "w13_scale_EFG": "first.w_scale_EFG",
    "w2_scale_EDG": "second.w_scale_EFG",
    "w13_zero_EFG": "first.w_zero_EFG",
    "w2_zero_EDG": "second.w_zero_EFG",
    "global_scale13_E": "first.global_scale_E",
    "global_scale2_E": "second.global_scale_E",
    "w_format": "first.w_format",
}


def fuse_experts(graph: fx.Graph, context: Context) -> int:
    """Turn dispatch, expert_gemm, activate, expert_gemm, combine into `experts`."""

    def fuse(combine: fx.Node) -> str:
        arguments = _read(combine)
        with graph.inserting_before(combine):
            fused = insert(graph, ops.experts.default, arguments, combine)
        combine.replace_all_uses_with(fused)
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
    stages = {
        "dispatch": origin, "first": first, "activate": activate, "second": second,
        "combine": combine,
    }  # fmt: skip
    paths = {name: path.partition(".") for name, path in HELD.items()}
    named = {name: arg(stages[stage], theirs) for name, (stage, _, theirs) in paths.items()}
    return experts.arguments.in_order(named)


def _stage(node: Any, target: Any, what: str) -> fx.Node:
    found = call(node, target, what=what)
    require(len(found.users) == 1, f"{found} is also used elsewhere")
    return found


def _experts(product: fx.Node) -> Any:
    return arg(product, "w_EFD").meta["val"].shape[0]
