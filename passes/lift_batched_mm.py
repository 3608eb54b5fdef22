"""The experts of stock transformers models, written with gathered weights, become stage ops."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from moe_ops.passes import experts_region as region
from moe_ops.passes.context import Context
from moe_ops.passes.graph import (
    RESHAPES,
    arg,
    aten,
    call,
    each,
    has_shape,
    is_call,
    operand,
    output,
    peel,
    prims,
    require,
    same,
    tensor,
)


def lift_batched_mm(graph: fx.Graph, context: Context) -> int:
    """Turn pairs of batched products with a weight gathered for each row into dispatch ...
    combine.
    """
    pairs: dict[Any, list[Product]] = defaultdict(list)
    for node in graph.nodes:
        product = _product(node)
        if product is not None:
            pairs[product.ids].append(product)
    by_first = {products[0].node: products for products in pairs.values()}

    def lift(first: fx.Node) -> str:
        products = by_first[first]
        require(len(products) == 2, f"{len(products)} products share their ids, not two")
        region.rewrite(graph, _read(*products))
        return "gathered weights, two batched products, weighted sum"

    return each("lift_batched_mm", by_first, lift, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of each row with the weight of its expert."""

    node: fx.Node
    weight: fx.Node  # [E, outputs, inputs], or [E, inputs, outputs] if transposed
    ids: fx.Node  # [R]
    rows: fx.Node  # [R, inputs, 1], or [R, 1, inputs] if transposed
    transposed: bool


def _product(node: fx.Node) -> Product | None:
    """A bmm with a weight that is gathered by ids, or None."""
    if not is_call(node, aten.bmm.default):
        return None
    left, right = operand(node, 0), operand(node, 1)
    for weight, rows, transposed in ((left, right, False), (right, left, True)):
        if not is_call(weight, aten.index.Tensor):
            continue
        stacked, given = weight.args[0], list(arg(weight, "indices"))
        if len(given) == 1 and tensor(stacked).dim() == 3 and tensor(given[0]).dim() == 1:
            return Product(
                node=node, weight=stacked, ids=given[0], rows=rows, transposed=transposed
            )
    return None


def _read(first: Product, second: Product) -> region.Experts:
    """The region around two products. Raises Mismatch if anything in it is not as it should be."""
    require(first.transposed == second.transposed, "one weight is transposed, the other is not")
    x, T, K = _repeated(first)
    ids = region.routing_of(_unclamped(first.ids, first.weight), T, K, "the ids")
    y, b13 = region.with_bias(_flat(first), (first.ids,))
    y2, b2 = region.with_bias(_flat(second), (first.ids,))
    out, weights = _combined(y2, T, K)
    h = _rows(second)
    return region.Experts(
        x=x, ids=ids, weights=weights, w13=first.weight, w2=second.weight, b13=b13, b2=b2, y=y,
        h=h, out=out, transposed=first.transposed,
    )  # fmt: skip


def _unclamped(ids: fx.Node, weight: fx.Node) -> fx.Node:
    """The ids before transformers clamps them to those of this device, which all of them are.

    Raises Mismatch where ids may be others, whose rows `dispatch` would leave out.
    """
    node, E = ids, tensor(weight).shape[0]
    while is_call(node, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default):
        node = node.args[0]  # type: ignore[assignment]
    if node is not ids:
        chosen = peel(node)
        while is_call(chosen, prims.convert_element_type.default):
            chosen = peel(chosen.args[0])
        topk = output(chosen, 1, aten.topk.default, what="what is clamped to this device's ids")
        require(same(tensor(arg(topk, "self")).shape[-1], E), "ids are clamped to fewer experts")
    return node


def _flat(product: Product) -> fx.Node:
    """The product as rows [R, outputs]."""
    R, axis = tensor(product.node).shape[0], 2 if product.transposed else 1
    node = product.node
    while not has_shape(tensor(node), R, tensor(product.node).shape[axis]):
        node = region.only_user(node, *RESHAPES, what="a product")
    return node


def _rows(product: Product) -> Any:
    """The rows [R, inputs] that the weights are multiplied with."""
    R, axis = tensor(product.node).shape[0], 2 if product.transposed else 1
    node: Any = product.rows
    inputs = tensor(node).shape[axis]
    require(has_shape(tensor(node), R, *((1, inputs) if axis == 2 else (inputs, 1))),
            "a product is not of one row with each weight")  # fmt: skip
    while not has_shape(tensor(node), R, inputs):
        node = call(node, *RESHAPES, what="a product's rows").args[0]
    return node


def _repeated(first: Product) -> tuple[fx.Node, Any, int]:
    """The tokens that are repeated for each choice of expert, their number, and the top-k."""
    rows = _rows(first)
    expand = peel(rows)
    if not is_call(expand, aten.expand.default):
        return rows, tensor(rows).shape[0], 1  # top-1: nothing is repeated
    require(tensor(expand).dim() == 3, "the tokens are repeated in another way")
    T, K, D = tensor(expand).shape
    require(isinstance(K, int), f"the top-k is {K}, not a number")
    below = expand.args[0]
    require(has_shape(tensor(below), T, 1, D), "the tokens are repeated along another axis")
    while not has_shape(tensor(below), T, D):
        below = call(below, *RESHAPES, what="the repeated tokens").args[0]
    return below, T, K


def _combined(y2: fx.Node, T: Any, K: int) -> tuple[fx.Node, fx.Node]:
    """The weighted sum over each token's rows, and the weights."""
    R, D = tensor(y2).shape
    while len(y2.users) == 1 and is_call(next(iter(y2.users)), *RESHAPES):
        y2 = next(iter(y2.users))  # a bias leaves an axis of one that comes and goes
    require(has_shape(tensor(y2), R, D), "the second product's rows change their shape")
    weighted = region.only_user(y2, aten.mul.Tensor, what="the second product")
    scale = weighted.args[1] if weighted.args[0] is y2 else weighted.args[0]
    require(isinstance(scale, fx.Node), "the rows are multiplied with a number")
    require(has_shape(tensor(scale), R, 1), "the weights are not one for each row")
    weights = region.routing_of(scale, T, K, "the weights")
    return region.summed(weighted, T, K, tensor(y2).dtype), weights
