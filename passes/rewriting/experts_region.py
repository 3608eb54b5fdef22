"""What the stock forms of an expert layer share: their parts, the checks, and the new nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moe_ops.passes.rewriting.activation import identify
from moe_ops.passes.rewriting.graph import (
    RESHAPES,
    Mismatch,
    arg,
    aten,
    between,
    call,
    has_shape,
    insert,
    is_call,
    operand,
    ops,
    outputs,
    prims,
    require,
    require_closed,
    tensor,
)

ROUNDS = "transformers/integrations/moe.py"  # the code whose sums are all rounded to x's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """An expert layer in a graph: what it reads, what it gives, and two nodes inside."""

    x: fx.Node  # [T, D]
    ids: fx.Node  # [T, K], integers
    weights: fx.Node  # [T, K], floats
    w13: fx.Node  # [E, F, D], or [E, D, F] if transposed
    w2: fx.Node
    b13: fx.Node | None  # [E, F]
    b2: fx.Node | None
    y: fx.Node  # [R, F], the first product with its bias
    h: fx.Node  # [R, I], the second product's input
    out: fx.Node  # [T, D], in float32 if its rounding to the dtype of x was dropped
    transposed: bool


def rewrite(graph: fx.Graph, found: Experts) -> None:
    """Put stage ops in the place of an expert layer. Raises Mismatch, and changes nothing, if the
    layer is used from outside or computes something else between its products.
    """
    x, w13, out = tensor(found.x), tensor(found.w13), tensor(found.out)
    E, T, D = w13.shape[0], x.shape[0], x.shape[1]
    dtypes = {tensor(n).dtype for n in (found.x, found.w13, found.w2)}
    require(len(dtypes) == 1, f"its input and weights differ in dtype: {dtypes}")
    require(x.dtype is not torch.float64, "it computes in float64")
    require(out.dtype is x.dtype or _is_rounded(found.out), f"its result is {out.dtype}")
    require(isinstance(E, int), "the number of experts is not known")
    require(has_shape(out, T, D), f"its result has the shape {tuple(out.shape)}")
    activation = identify(found.y, found.h)
    leaves = [found.x, found.ids, found.weights, found.w13, found.w2]
    leaves += [b for b in (found.b13, found.b2) if b is not None]
    require_closed(between(found.out, leaves), found.out)
    origin = found.out
    require(tensor(found.w2).shape[0] == E, "the two weights differ in their number of experts")
    with graph.inserting_before(found.out):
        dispatch = insert(graph, ops.dispatch.default, (found.x, found.ids, E), origin)
        x_RD, rows_R, ends_E = outputs(graph, dispatch)
        first = (x_RD, found.w13, ends_E, found.b13, found.transposed)
        y_RF = insert(graph, ops.expert_gemm.default, first, origin)
        h_RI = insert(graph, ops.activate.default, (y_RF, *activation.args), origin)
        second = (h_RI, found.w2, ends_E, found.b2, found.transposed)
        y_RD = insert(graph, ops.expert_gemm.default, second, origin)
        out_TD = insert(graph, ops.combine.default, (y_RD, found.weights, rows_R), origin)
        if out.dtype is not x.dtype:
            wide = (out_TD, out.dtype)
            out_TD = insert(graph, prims.convert_element_type.default, wide, origin)
    found.out.replace_all_uses_with(out_TD)
    graph.erase_node(found.out)


def routing_of(flat: Any, T: Any, K: int, what: str) -> Any:
    """The [T, K] node whose elements these are, in row-major order."""
    node = flat
    while not has_shape(tensor(node), T, K):
        if not is_call(node, *RESHAPES):
            raise Mismatch(f"{what} are {node}, not the elements of a [tokens, {K}] tensor")
        node = node.args[0]
    return node


def weight(node: Any) -> tuple[fx.Node, bool]:
    """A stacked weight as it lies, and whether its rows are inputs ([E, inputs, outputs])."""
    require(isinstance(node, fx.Node), "a product's weight is no tensor")
    require(tensor(node).dim() == 3, "a product's weight has not three axes")
    if is_call(node, aten.permute.default) and list(node.args[1]) == [0, 2, 1]:
        return node.args[0], False
    if is_call(node, aten.transpose.int) and {d % 3 for d in node.args[1:]} == {1, 2}:
        return node.args[0], False
    return node, True


def indices(index: fx.Node, count: int) -> list[Any]:
    """The index tensors of an aten.index, of which there must be so many, for the first axes."""
    given = list(arg(index, "indices"))
    require(len(given) == count and None not in given, f"{index} is indexed in another way")
    return given


def with_bias(product: fx.Node, ids: tuple[fx.Node, ...]) -> tuple[fx.Node, fx.Node | None]:
    """A product with the bias that is added to it for each row's expert, if there is one.

    ids: the nodes that hold the rows' experts, any of which may pick the bias.
    """
    for user in product.users:
        if is_call(user, aten.add.Tensor) and arg(user, "alpha") == 1:
            other = operand(user, 1 if user.args[0] is product else 0)
            if is_call(other, aten.index.Tensor) and arg(other, "indices")[0] in ids:
                require(tensor(other.args[0]).dim() == 2, "a bias has not two axes")
                require(len(arg(other, "indices")) == 1, "a bias is picked in another way")
                same_dtype = tensor(user).dtype is tensor(product).dtype
                require(same_dtype, "a bias is added in another dtype")
                return user, other.args[0]
    return product, None


def only_user(node: fx.Node, *targets: Any, what: str) -> fx.Node:
    """The one node that uses this one. Raises Mismatch if there are others, or it is another."""
    users = list(node.users)
    require(len(users) == 1, f"{what} is used by {len(users)} nodes, not one")
    return call(users[0], *targets, what=f"what uses {what}")


def summed(rows: fx.Node, T: Any, K: int, dtype: torch.dtype) -> fx.Node:
    """The sum over K of rows [T * K, D], with the conversion to `dtype` if one follows.

    It stays in float32 where the model rounds it and Inductor does not, see `_is_rounded`.
    """
    D = tensor(rows).shape[1]
    view = only_user(rows, aten.reshape.default, aten.view.default, what="the weighted rows")
    require(has_shape(tensor(view), T, K, D), f"the rows are summed as {tuple(tensor(view).shape)}")
    total = only_user(view, aten.sum.dim_IntList, what="the weighted rows")
    require(list(arg(total, "dim")) in ([1], [-2]), "the rows are summed along another axis")
    require(not arg(total, "keepdim"), "the sum keeps its axis")
    if tensor(total).dtype is not dtype and not _is_rounded(total):
        total = only_user(total, prims.convert_element_type.default, what="the sum")
    return total


def _is_rounded(total: fx.Node) -> bool:
    """Whether the model rounds a sum in float32 that nothing rounds in the graph.

    Of conversions to bfloat16 and back Inductor of torch 2.11 drops both. transformers rounds all
    of its sums of experts, so one that comes from there and is used in float32 was rounded.
    """
    places = re.findall(r'File "([^"]+)"', str(total.meta.get("stack_trace")))
    is_theirs = bool(places) and places[-1].replace("\\", "/").endswith(ROUNDS)
    converts = any(is_call(user, prims.convert_element_type.default) for user in total.users)
    return is_theirs and not converts and tensor(total).dtype is torch.float32
