"""Linear layers of one input with few rows become one op, which reads each weight once.

A step of `generate` waits until its weights are read. A launch for each weight, tuned for many
rows, reads them too slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moe_ops.backends.triton_device import LEAST_CAPABILITY
from moe_ops.decode_ops.linears import DTYPES, MOST_ROWS, LinearsCall, refusal
from moe_ops.kernels import gpus
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    FUNCTIONAL,
    Mismatch,
    aten,
    call,
    each,
    insert,
    is_call,
    layer_of,
    operand,
    ops,
    outputs,
    parameters_of,
    peel,
    prims,
    require,
    tensor,
)

RULE = "merge_linears"
PLAN = {"plan": "triton"}  # what `runs_kernels` asks for
ROUTERS = tuple(
    getattr(op, name)
    for op in (ops.route, ops.moe, ops.route_recording, ops.route_replaying)
    for name in op.overloads()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The node `out` [T, N] is x wᵀ + b; in float32 if its rounding to the dtype of x is left to
    its users, of which Inductor drops those that convert it back."""

    out: fx.Node
    x: fx.Node
    w: fx.Node
    b: fx.Node | None


def merge_linears(graph: fx.Graph, context: Context) -> int:
    """Turn the products of an input of up to 64 rows with parameters into one `linears` for each
    input, where a GPU runs them. Products of other rows, dtypes and devices are passed over, and
    all where they have to be batch invariant, which holds of any number of rows or of none."""
    if not context.options.linears or context.options.batch_invariant:
        return 0
    parameters = parameters_of(graph)
    groups: dict[tuple[fx.Node, torch.Size], list[Linear]] = {}
    for node in graph.nodes:
        if is_product(node) and is_ours(node):
            try:
                found = read(node, parameters)
            except Mismatch as reason:
                context.refuse(RULE, node.name, layer_of(node), str(reason))
            else:
                groups.setdefault((peel(found.x), tensor(found.x).shape), []).append(found)
    firsts = {group[0].out: group for group in groups.values()}

    def rewrite(first: fx.Node) -> str:
        x = read(first, parameters).x  # of a product of a product it is another one by now
        return _merge(graph, x, firsts[first])

    return each(RULE, firsts, rewrite, context)


def is_product(node: fx.Node) -> bool:
    """Whether a node is a product of matrices, or the sum that Inductor makes of one with one
    row."""
    return is_call(node, aten.mm.default, aten.addmm.default) or (
        is_call(node, aten.sum.dim_IntList) and is_from_mm(node)
    )


def is_from_mm(node: fx.Node) -> bool:
    """Whether a node is a part of what a product was decomposed into."""
    # By name: metadata is copied, and a copy of an op is another one.
    return str(node.meta.get("original_aten")) == "aten.mm.default"


def is_ours(node: fx.Node) -> bool:
    """Whether a node is small enough for our kernels to be fast at, whatever it computes."""
    out = tensor(node)
    return (
        out.dim() == 2
        and isinstance(out.shape[0], int)
        and out.shape[0] <= MOST_ROWS
        and runs_kernels(out.device)
    )


def runs_kernels(device: torch.device) -> bool:
    """Whether a device is a GPU that our kernels are for."""
    return device.type == "cuda" and gpus.capability(device) >= LEAST_CAPABILITY


def read(node: fx.Node, parameters: set[fx.Node]) -> Linear:
    """The linear layer that a node computes, if it is one for `linears`. Raises Mismatch for any
    other node."""
    found = layer_in(node, parameters)
    x, w, b = found.x, found.w, found.b
    require(tensor(x).dtype in DTYPES, f"the input is {tensor(x).dtype}")
    linear = LinearsCall(tensor(x), [tensor(w)], [None if b is None else tensor(b)])
    reason = refusal(linear)
    require(reason is None, str(reason))
    return found


def layer_in(node: fx.Node, parameters: set[fx.Node]) -> Linear:
    """The linear layer of any rows and dtype that a node computes. Raises Mismatch for any other
    node."""
    b: Any = None
    if node.target is aten.sum.dim_IntList:
        x, transposed = _of_one_row(node)
    elif node.target is aten.mm.default:
        x, transposed = operand(node, 0), operand(node, 1)
    else:
        b, x, transposed = node.args[:3]
        require(not node.kwargs, "it scales its operands")
    transposed = call(transposed, aten.permute.default, what="the weight")
    require(list(operand(transposed, 1)) == [1, 0], "the weight is not a transposed one")
    w = operand(transposed, 0)
    require(w in parameters, f"the weight {w} is no parameter")
    require(b is None or b in parameters, f"the bias {b} is no parameter")
    return Linear(out=node, x=x, w=w, b=b)


def _of_one_row(node: fx.Node) -> tuple[Any, Any]:
    """The operands of what Inductor makes of a product of 16-bit matrices, the first of one row:
    in float32 (x.unsqueeze(2) * w.t().unsqueeze(0)).sum(1)."""
    require(list(operand(node, 1)) == [1] and len(node.args) == 2, "it sums another axis")
    product = call(operand(node, 0), aten.mul.Tensor, what="the sum's input")
    factors = []
    for place, axis in ((0, 2), (1, 0)):
        wide = call(operand(product, place), aten.unsqueeze.default, what="a factor")
        require(operand(wide, 1) == axis, "the factors do not form a product of matrices")
        factors.append(
            call(operand(wide, 0), prims.convert_element_type.default, what="a factor in float32")
        )
    # Where a model itself converts its weight nothing is rounded.
    require(is_from_mm(factors[1]), "it is a product of float32")
    x, transposed = (operand(factor, 0) for factor in factors)
    require(tensor(x).dtype is tensor(transposed).dtype, "the factors have two dtypes")
    require(tensor(x).shape[0] == 1, "it has several rows")
    return x, transposed


def _merge(graph: fx.Graph, x: fx.Node, group: list[Linear]) -> str:
    first = group[0].out
    with graph.inserting_before(first):
        arguments = (x, [g.w for g in group], [g.b for g in group])
        merged = insert(graph, ops.linears.planned, arguments, first, PLAN)
        for linear, y in zip(group, outputs(graph, merged), strict=True):
            replace_by(graph, linear.out, y)
    for linear in group:  # not before: new nodes go in front of the first, while it is there
        graph.erase_node(linear.out)
    return f"{len(group)} of {list(tensor(x).shape)}"


def replace_by(graph: fx.Graph, out: fx.Node, y: fx.Node) -> None:
    """Put an output of an op, which is rounded to its dtype, in place of a product."""
    dtype = tensor(y).dtype
    for user in list(out.users) if tensor(out).dtype is not dtype else []:
        if is_call(user, prims.convert_element_type.default) and operand(user, 1) is dtype:
            user.replace_all_uses_with(y)
            graph.erase_node(user)
        elif _routes(user):  # by logits of any dtype, taken as float32
            user.replace_input_with(out, y)
            given = fx.node.map_arg((user.args, user.kwargs), lambda n: n.meta["val"])
            user.meta["eager_input_vals"] = given
    if tensor(out).dtype is not dtype and out.users:
        y = insert(graph, prims.convert_element_type.default, (y, torch.float32), out)
    out.replace_all_uses_with(y)


def _routes(node: fx.Node) -> bool:
    """Whether a node calls a router, perhaps one that writes to rings."""
    if is_call(node, FUNCTIONAL):
        return node.args[0] in ROUTERS
    return is_call(node, *ROUTERS)
