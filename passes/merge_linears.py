"""Linear layers of one input with few rows become one op, which reads each weight once.

A step of `generate` waits for its weights: a launch for each of them, made for many rows, is what
it has no use for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from moe_ops.kernels.linears import DTYPES, MOST_ROWS, refusal
from moe_ops.passes.context import Context
from moe_ops.passes.graph import (
    Mismatch,
    aten,
    call,
    each,
    insert,
    is_call,
    layer_of,
    operand,
    outputs,
    peel,
    prims,
    require,
    tensor,
)

RULE = "merge_linears"
PRODUCTS = (aten.mm.default, aten.addmm.default)
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The node `out` [T, N] is x wᵀ + b, rounded once to the dtype of x."""

    out: fx.Node
    x: fx.Node
    w: fx.Node
    b: fx.Node | None


def merge_linears(graph: fx.Graph, context: Context) -> int:
    """Turn the products of an input of up to 64 rows with parameters into one `linears` for each
    input, where a GPU runs them. Products of other rows, dtypes and devices are passed over."""
    if not context.options.linears:
        return 0
    parameters = parameters_of(graph)
    groups: dict[tuple[fx.Node, torch.Size], list[Linear]] = {}
    for node in graph.nodes:
        if (is_call(node, *PRODUCTS) or is_rounded_sum(node)) and is_ours(node):
            try:
                found = read(node, parameters)
            except Mismatch as reason:
                if is_call(node, *PRODUCTS):  # most sums are no products
                    context.refuse(RULE, node.name, layer_of(node), str(reason))
            else:
                groups.setdefault((peel(found.x), tensor(found.x).shape), []).append(found)
    firsts = {group[0].out: group for group in groups.values()}
    return each(RULE, firsts, lambda node: _merge(graph, firsts[node]), context)


def is_rounded_sum(node: fx.Node) -> bool:
    """Whether it converts a sum."""
    convert = is_call(node, prims.convert_element_type.default)
    return convert and is_call(operand(node, 0), aten.sum.dim_IntList)


def is_ours(node: fx.Node) -> bool:
    """Whether it is for our kernels to be fast at, whatever it computes."""
    out = tensor(node)
    return (
        out.dim() == 2
        and isinstance(out.shape[0], int)
        and out.shape[0] <= MOST_ROWS
        and (runs_kernels(out.device))
    )


def runs_kernels(device: torch.device) -> bool:
    """Whether a device is a GPU that our kernels are for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def parameters_of(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of the graph that stay where they are from call to call: no launch of the model
    writes them."""
    context = TracingContext.try_get()
    known = context.fw_metadata.static_input_indices if context and context.fw_metadata else []
    inputs = graph.find_nodes(op="placeholder")
    return {inputs[i] for i in known if i < len(inputs)}


def read(node: fx.Node, parameters: set[fx.Node]) -> Linear:
    """The linear layer that a node computes. Raises Mismatch for any other node."""
    b: Any = None
    if is_rounded_sum(node):
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
    require(tensor(x).dtype in DTYPES, f"the input is {tensor(x).dtype}")
    reason = refusal(tensor(x), [tensor(w)], [None if b is None else tensor(b)])
    require(reason is None, str(reason))
    return Linear(out=node, x=x, w=w, b=b)


def _of_one_row(node: fx.Node) -> tuple[Any, Any]:
    """The operands of what Inductor makes of a product with one row: in float32
    (x.unsqueeze(2) * w.t().unsqueeze(0)).sum(1), and rounded to the dtype of x."""
    total = operand(node, 0)
    require(len(total.args) == 2 and list(operand(total, 1)) == [1], "it sums another axis")
    require(not total.kwargs, "it sums in another dtype")
    product = call(operand(total, 0), aten.mul.Tensor, what="the sum's input")
    factors = []
    for place, axis in ((0, 2), (1, 0)):
        wide = call(operand(product, place), aten.unsqueeze.default, what="a factor")
        require(operand(wide, 1) == axis, "the factors do not form a product of matrices")
        factor = call(operand(wide, 0), prims.convert_element_type.default, what="a factor")
        require(operand(factor, 1) is torch.float32, "it does not sum in float32")
        factors.append(operand(factor, 0))
    require(tensor(factors[0]).shape[0] == 1, "it has several rows")
    require(operand(node, 1) is tensor(factors[0]).dtype, "it rounds to another dtype")
    return factors[0], factors[1]


def _merge(graph: fx.Graph, group: list[Linear]) -> str:
    first = group[0].out
    with graph.inserting_before(first):
        arguments = (group[0].x, [g.w for g in group], [g.b for g in group])
        merged = insert(graph, torch.ops.moe_ops.linears.default, arguments, first)
        ys = outputs(graph, merged)
    for linear, y in zip(group, ys, strict=True):
        linear.out.replace_all_uses_with(y)
        graph.erase_node(linear.out)
    return f"{len(group)} of {list(tensor(group[0].x).shape)}"
