"""The experts of stock transformers models, written with gathered weights, become stage ops."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moe_ops.passes.rewriting import experts_region as region
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
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

    node: fx.Node  # [R, outputs, 1], or [R, 1, outputs] if transposed
    weight: fx.Node  # [E, outputs, inputs], or [E, inputs, outputs] if transposed
    ids: fx.Node  # [R]
    rows: fx.Node  # the elements of [R, inputs]
    transposed: bool

    @property
    def inputs(self) -> Any:
        return tensor(self.weight).shape[1 if self.transposed else 2]

    @property
    def outputs(self) -> Any:
        return tensor(self.weight).shape[2 if self.transposed else 1]


def _product(node: fx.Node) -> Product | None:
    """A product with a weight that is gathered by ids, or None."""
    if is_call(node, aten.bmm.default):
        return _bmm(node)
    return _sum_of_products(node) if is_call(node, aten.sum.dim_IntList) else None


def _bmm(node: fx.Node) -> Product | None:
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


def _sum_of_products(node: fx.Node) -> Product | None:
    """A bmm with one row as Inductor spells it when it tunes: multiplied in four axes in float32,
    and summed over the inputs.
    """
    mul = arg(node, "self")
    if not is_call(mul, aten.mul.Tensor) or tensor(mul).dim() != 4:
        return None
    if list(arg(node, "dim")) not in ([2], [-2]) or arg(node, "keepdim"):
        return None
    R, _, inputs, _ = tensor(mul).shape
    left, right = operand(mul, 0), operand(mul, 1)
    for weight, rows, transposed in ((left, right, False), (right, left, True)):
        index = _below_cast(weight, 3)
        if not is_call(index, aten.index.Tensor) or len(arg(index, "indices")) != 1:
            continue
        stacked, (ids,) = operand(index, 0), arg(index, "indices")
        if tensor(stacked).dim() != 3 or tensor(ids).dim() != 1:
            continue
        result = node
        if tensor(node).dtype is not tensor(stacked).dtype:
            result = region.only_user(node, prims.convert_element_type.default, what="a product")
        found = Product(
            node=result, weight=stacked, ids=ids, rows=_below_cast(rows, 2), transposed=transposed
        )
        shape = (R, 1, inputs, found.outputs) if transposed else (R, found.outputs, inputs, 1)
        fits = has_shape(tensor(weight), *shape) and has_shape(tensor(rows), R, 1, inputs, 1)
        if fits and same(found.inputs, inputs) and tensor(result).dtype is tensor(stacked).dtype:
            return found
    return None


def _below_cast(node: Any, dims: int) -> Any:
    """The elements with so many axes, before they were given more and converted to float32."""
    while is_call(node, *RESHAPES, prims.convert_element_type.default):
        cast = node.target is prims.convert_element_type.default
        if node.args[1] is not torch.float32 if cast else tensor(node).dim() == dims:
            break
        node = node.args[0]
    return node


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
    node, R = product.node, tensor(product.node).shape[0]
    while not has_shape(tensor(node), R, product.outputs):
        node = region.only_user(node, *RESHAPES, what="a product")
    return node


def _rows(product: Product) -> Any:
    """The rows [R, inputs] that the weights are multiplied with."""
    R = tensor(product.node).shape[0]
    one = (1, product.outputs) if product.transposed else (product.outputs, 1)
    require(has_shape(tensor(product.node), R, *one), "a product is not of one row each")
    node: Any = product.rows
    while not has_shape(tensor(node), R, product.inputs):
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
