"""The experts of stock transformers models, written with grouped products, become stage ops."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from moe_ops.passes.rewriting import experts_region as region
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    Mismatch,
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
from moe_ops.passes.rewriting.products import is_grouped, offsets_of, require_plain


def lift_grouped_mm(graph: fx.Graph, context: Context) -> int:
    """Turn pairs of grouped products over rows sorted by expert into dispatch ... combine."""
    pairs: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_grouped(node):
            pairs[offsets_of(node)].append(node)

    def lift(first: fx.Node) -> str:
        products = pairs[offsets_of(first)]
        require(len(products) == 2, f"{len(products)} products share their offsets, not two")
        region.rewrite(graph, _read(*products))
        return "sort, two grouped products, weighted sum"

    return each("lift_grouped_mm", [products[0] for products in pairs.values()], lift, context)


def _read(first: fx.Node, second: fx.Node) -> region.Experts:
    """The region around two products. Raises Mismatch if anything in it is not as it should be."""
    for product in (first, second):
        require_plain(product)
    E = tensor(first.args[1]).shape[0]
    sorted_ids = _sorted_ids(offsets_of(first), E)
    elsewhere = Elsewhere(sorted_ids, E)
    permutation = _other_output(sorted_ids)
    x, K = _gathered(elsewhere.below(first.args[0]), permutation)
    ids = region.routing_of(arg(operand(sorted_ids, 0), "self"), tensor(x).shape[0], K, "the ids")
    y, b13 = elsewhere.above(*region.with_bias(first, elsewhere.ids))
    y2, b2 = elsewhere.above(*region.with_bias(second, elsewhere.ids))
    if elsewhere.clamped in elsewhere.used:
        require(y2 in elsewhere.masked, "rows of other devices' experts get a bias")
    out, weights = _combined(y2, permutation, tensor(x).shape[0], K)
    w13, first_transposed = region.weight(first.args[1])
    w2, second_transposed = region.weight(second.args[1])
    require(first_transposed == second_transposed, "one weight is transposed, the other is not")
    return region.Experts(
        x=x, ids=ids, weights=weights, w13=w13, w2=w2, b13=b13, b2=b2, y=y,
        h=operand(second, 0), out=out, transposed=first_transposed,
    )  # fmt: skip


class Elsewhere:
    """Rows whose id is E or more, of experts elsewhere: transformers sets them to zero, and clamps
    their ids to add some bias before. `dispatch` leaves them out.
    """

    def __init__(self, sorted_ids: fx.Node, experts: int) -> None:
        self.sorted, self.experts = sorted_ids, experts
        clamps = [n for n in sorted_ids.users if is_call(n, aten.clamp_max.default)]
        self.clamped = next((n for n in clamps if n.args[1] == experts - 1), None)
        self.ids = tuple(n for n in (sorted_ids, self.clamped) if n is not None)
        self.masked: set[fx.Node] = set()

    @property
    def used(self) -> set[Any]:
        """The ids by which a bias is picked."""
        picks = [n for ids in self.ids for n in ids.users if is_call(n, aten.index.Tensor)]
        return {ids for n in picks for ids in arg(n, "indices")}

    def below(self, node: Any) -> Any:
        """The rows before they are set to zero elsewhere."""
        return arg(node, "other") if self._masks(node) else node

    def above(self, node: fx.Node, bias: fx.Node | None) -> tuple[fx.Node, fx.Node | None]:
        """The rows after they are set to zero elsewhere, and their bias as it came."""
        for user in node.users:
            if len(node.users) == 1 and self._masks(user) and arg(user, "other") is node:
                self.masked.add(user)
                return user, bias
        return node, bias

    def _masks(self, node: Any) -> bool:
        if not is_call(node, aten.where.self):
            return False
        beyond, zero = peel(arg(node, "condition")), arg(node, "self")
        return (
            is_call(beyond, aten.ge.Scalar)
            and tuple(beyond.args) == (self.sorted, self.experts)
            and is_call(zero, aten.full.default)
            and zero.args[1] == 0
            and tensor(arg(node, "condition")).dim() == 2
            and same(tensor(arg(node, "condition")).shape[1], 1)
        )


def _sorted_ids(offsets: Any, experts: int) -> Any:
    """The sorted ids whose counts, summed up, are the offsets."""
    cumsum = call(offsets, aten.cumsum.default, what="the offsets")
    require(arg(cumsum, "dim") in (0, -1), "the offsets are summed along another axis")
    require(tensor(cumsum).dtype is torch.int32, "the offsets are not int32")
    counts = call(arg(cumsum, "self"), aten.histc.default, what="the counts")
    bins = tuple(arg(counts, name) for name in ("bins", "min", "max"))
    require(bins == (experts, 0, experts - 1), f"the counts are of bins {bins}, not {experts} ids")
    ids = arg(counts, "self")
    if is_call(ids, prims.convert_element_type.default):
        # Counts of float32 are exact up to 2**24 rows, as the ids themselves are.
        ids = ids.args[0]
    output(ids, 0, aten.sort.default, aten.sort.stable, what="the counted ids")
    sort = ids.args[0]
    require(not arg(sort, "descending"), "the ids are sorted in descending order")
    require(tensor(ids).dim() == 1, "the sorted ids are not flat")
    return ids


def _other_output(sorted_ids: fx.Node) -> fx.Node:
    for user in sorted_ids.args[0].users:  # type: ignore[union-attr]
        if is_call(user, operator.getitem) and user.args[1] == 1:
            return user
    raise Mismatch("the sort's permutation is not used")


def _gathered(rows: Any, permutation: fx.Node) -> tuple[fx.Node, int]:
    """The tokens that the rows are copied from, and the top-k."""
    index = call(rows, aten.index.Tensor, what="the first product's input")
    (tokens,) = region.indices(index, 1)
    div = call(tokens, aten.div.Tensor_mode, aten.floor_divide.default, what="the rows' tokens")
    if div.target is aten.div.Tensor_mode:
        require(arg(div, "rounding_mode") == "floor", "the rows' tokens are not rounded down")
    require(div.args[0] is permutation, "the rows' tokens are not those of the sorted ids")
    K = div.args[1]
    require(isinstance(K, int), f"the top-k is {K}, not a number")
    return index.args[0], K  # type: ignore[return-value]


def _combined(y2: fx.Node, permutation: fx.Node, T: Any, K: int) -> tuple[fx.Node, fx.Node]:
    """The weighted sum over each token's rows, put back into the tokens' order; and the weights."""
    weighted = region.only_user(y2, aten.mul.Tensor, what="the second product")
    scale = weighted.args[1] if weighted.args[0] is y2 else weighted.args[0]
    picked = call(peel(scale), aten.index.Tensor, what="the rows' weights")
    require(
        has_shape(tensor(scale), tensor(y2).shape[0], 1), "the weights are not one for each row"
    )
    (order,) = region.indices(picked, 1)
    require(order is permutation, "the rows' weights are not in the order of the sorted ids")
    weights = region.routing_of(picked.args[0], T, K, "the weights")
    back = region.only_user(weighted, aten.index.Tensor, what="the weighted rows")
    (inverse,) = region.indices(back, 1)
    _check_inverse(inverse, permutation)
    return region.summed(back, T, K, tensor(y2).dtype), weights


def _check_inverse(inverse: Any, permutation: fx.Node) -> None:
    """Require inverse[permutation] = 0, 1, 2, ..."""
    put = call(inverse, aten.index_put.default, aten.scatter.src, what="the inverse permutation")
    if put.target is aten.scatter.src:
        place, source = put.args[2:4]
    else:
        require(not arg(put, "accumulate"), "the inverse permutation accumulates")
        (place,), source = operand(put, 1), operand(put, 2)
    require(place is permutation, "the inverse is that of another permutation")
    iota = call(source, prims.iota.default, what="what is put into the inverse permutation")
    start, step = iota.kwargs.get("start"), iota.kwargs.get("step")
    require((start, step) == (0, 1), "the inverse permutation does not count from 0 by 1")
    rows = tensor(permutation).shape[0]
    require(has_shape(tensor(iota), rows), "the inverse counts to another number of rows")
    require(has_shape(tensor(put), rows), "the inverse has another length")
