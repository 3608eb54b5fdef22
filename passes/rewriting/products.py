"""Which products of matrices a graph has with weights, whatever Inductor made of them.

A linear layer is a product of two matrices with or without a bias, one of batches of them, or the
sum of products of numbers into which Inductor takes some with one row or one column apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from moe_ops.passes.rewriting.graph import (
    RESHAPES,
    arg,
    aten,
    insert,
    is_call,
    operand,
    parameters_of,
    prims,
    require,
    same,
    tensor,
)

MATRICES = (aten.mm.default, aten.addmm.default)
BATCHES = (aten.bmm.default, aten.baddbmm.default)
# By name: metadata is copied, and a copy of an op is another one.
TAKEN_APART = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "mv", "dot"))
Size = int | fx.Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`out` is x W as `shape` says, or alpha x W + beta b. x [R, K] are rows of one weight, or of
    one for each equal part, or, by `ends`, for each part. w is [N, K] or `transposed` [K, N], of
    several [E, N, K] or [E, K, N]. `columns`: it is Wᵀ xᵀ, whose last two axes are exchanged."""

    out: fx.Node
    x: fx.Node
    w: fx.Node
    transposed: bool
    shape: tuple[Size, ...]
    ends: fx.Node | None = None
    columns: bool = False


def weights_of(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose numbers are those of parameters alone."""
    known = parameters_of(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            known.add(node)
        elif node.op == "call_function" and not node.is_impure():
            inputs = node.all_input_nodes
            sizes = [n for n in inputs if not isinstance(n.meta.get("val"), (Tensor, tuple, list))]
            if len(sizes) < len(inputs) and all(n in known for n in inputs if n not in sizes):
                known.add(node)
    return known


def multiplies_weights(node: fx.Node, weights: set[fx.Node]) -> bool:
    """Whether a node sums products of numbers of a weight with others."""
    factors = _factors(node)
    if factors is None or sum(factor in weights for factor in factors) != 1:
        return False
    if is_call(node, aten.sum.dim_IntList):
        return True
    return not same(tensor(factors[0]).shape[-1], 1)  # a single product is exact


def _factors(node: fx.Node) -> tuple[Any, Any] | None:
    """What a node multiplies, if it is a product of matrices."""
    if is_call(node, aten.mm.default, aten.bmm.default) or is_grouped(node):
        return operand(node, 0), operand(node, 1)
    if is_call(node, aten.addmm.default, aten.baddbmm.default):
        return operand(node, 1), operand(node, 2)
    if is_call(node, aten.sum.dim_IntList) and is_taken_apart(node):
        product = operand(node, 0)
        if is_call(product, aten.mul.Tensor) and all(isinstance(a, fx.Node) for a in product.args):
            return operand(product, 0), operand(product, 1)
    return None


def is_grouped(node: fx.Node) -> bool:
    """Whether a node is a grouped product, or the loop over experts that transformers has in its
    place where torch has none for a dtype."""
    return is_call(node, aten._grouped_mm.default) or (
        node.op == "call_function"
        and str(node.target) == "transformers.grouped_mm_fallback.default"
    )


def offsets_of(product: fx.Node) -> Any:
    """Where the rows of each weight of a grouped product end."""
    return product.args[2] if len(product.args) > 2 else product.kwargs.get("offs")


def require_plain(product: fx.Node) -> None:
    """Raise Mismatch for a grouped product that adds or converts something."""
    if is_call(product, aten._grouped_mm.default):
        bias, dtype = arg(product, "bias"), arg(product, "out_dtype")
        require(bias is None and dtype is None, "a product has a bias or another dtype")


def is_taken_apart(node: fx.Node) -> bool:
    """Whether a node is a part of what a product was decomposed into."""
    return str(node.meta.get("original_aten")) in TAKEN_APART


def product_of(graph: fx.Graph, node: fx.Node, weights: set[fx.Node]) -> Product:
    """What a node of `multiplies_weights` computes, with new nodes in front of it for its operands.
    Raises Mismatch for what is none of the forms."""
    with graph.inserting_before(node):
        if is_call(node, *MATRICES):
            return _of_matrices(graph, node, weights)
        if is_call(node, *BATCHES):
            return _of_batches(graph, node, weights)
        if is_call(node, aten.sum.dim_IntList):
            return _of_sum(graph, node, weights)
        return _of_groups(graph, node, weights)


def _of_matrices(graph: fx.Graph, node: fx.Node, weights: set[fx.Node]) -> Product:
    left, right = _operands(node)
    if left in weights:
        x = _turned(graph, right, (1, 0))
        shape = (*sizes_of(graph, right, 1), *sizes_of(graph, left, 0))
        return Product(out=node, x=x, w=left, transposed=False, shape=shape, columns=True)
    w, transposed = _weight(graph, right, (1, 0))
    shape = (*sizes_of(graph, left, 0), *sizes_of(graph, right, 1))
    return Product(out=node, x=left, w=w, transposed=transposed, shape=shape)


def _of_batches(graph: fx.Graph, node: fx.Node, weights: set[fx.Node]) -> Product:
    """A batch is a part of the rows; those of one weight, which was expanded, are all of them."""
    left, right = _operands(node)
    columns = left in weights
    x, w = (_turned(graph, right, (0, 2, 1)), left) if columns else (left, right)
    transposed = not columns
    batch, rows = sizes_of(graph, x, 0, 1)
    width = tensor(w).shape[2 if transposed else 1]
    require(isinstance(width, int), "the weight has no fixed width")
    if same(tensor(w).shape[0], 1) or tensor(w).stride(0) == 0:
        w = insert(graph, aten.select.int, (w, 0, 0), node)
        if transposed:
            w, transposed = _weight(graph, w, (1, 0))
    elif transposed:
        w, transposed = _weight(graph, w, (0, 2, 1))
    flat = insert(graph, aten.reshape.default, (x, [-1, *sizes_of(graph, x, 2)]), node)
    return Product(
        out=node, x=flat, w=w, transposed=transposed, shape=(batch, rows, width),
        columns=columns,
    )  # fmt: skip


def _of_groups(graph: fx.Graph, node: fx.Node, weights: set[fx.Node]) -> Product:
    """A grouped product of sorted rows."""
    x, w, ends = operand(node, 0), operand(node, 1), offsets_of(node)
    require(w in weights and ends is not None, "its weights are not those of the rows")
    require(tensor(x).dim() == 2 and tensor(w).dim() == 3, "it is not one of sorted rows")
    require_plain(node)
    shape = (*sizes_of(graph, x, 0), *sizes_of(graph, w, 2))
    w, transposed = _weight(graph, w, (0, 2, 1))
    return Product(out=node, x=x, w=w, transposed=transposed, shape=shape, ends=ends)


def _of_sum(graph: fx.Graph, node: fx.Node, weights: set[fx.Node]) -> Product:
    """The sum over one axis of an outer product over the others, of which x has the first and the
    weight the last; ahead of them may be one that both have. What Inductor converts to float32 is
    taken as it was."""
    factors, product = _factors(node), operand(node, 0)
    assert factors is not None
    require(len(operand(node, 1)) == 1, "it sums several axes")
    x, w = factors if factors[1] in weights else factors[::-1]
    rank = tensor(product).dim()
    axis = operand(node, 1)[0] % rank
    of_x, of_w = (_axes(t, product, axis) for t in (x, w))
    both = [i for i in of_x if i in of_w]
    of_w = [i for i in of_w if i not in both]
    mine = [i for i in range(rank) if i not in (axis, *both, *of_w)]
    require([*both, *mine, *of_w] == [i for i in range(rank) if i != axis], "its axes are mixed")
    require(len(both) < 2, "its operands share several axes that it does not sum")
    shape: list[Size] = sizes_of(graph, product, *both, *mine, *of_w)
    if len(node.args) > 2 and operand(node, 2):
        shape.insert(axis, 1)
    x, w = (_unconverted(graph, t) for t in (x, w))
    require(tensor(x).dtype is tensor(w).dtype, "the factors have two dtypes")
    K = tensor(product).shape[axis]
    x = insert(graph, aten.reshape.default, (_behind(graph, x, rank, axis), [-1, K]), x)
    parts = sizes_of(graph, product, *both)
    rows = [*parts, -1, K] if both else [-1, K]
    w = insert(graph, aten.reshape.default, (_behind(graph, w, rank, axis), rows), w)
    return Product(out=node, x=x, w=w, transposed=False, shape=tuple(shape))


def _axes(factor: fx.Node, product: fx.Node, axis: int) -> list[int]:
    """The axes of a product of numbers but the one that is summed along which a factor has several,
    or may."""
    sizes = tensor(product).shape
    mine = [1] * (len(sizes) - tensor(factor).dim()) + list(tensor(factor).shape)
    require(same(mine[axis], sizes[axis]), "a factor has one number for all that is summed")
    return [i for i, n in enumerate(mine) if i != axis and not same(n, 1)]


def _behind(graph: fx.Graph, factor: fx.Node, rank: int, axis: int) -> fx.Node:
    """A factor with the axis that is summed behind all others."""
    axis -= rank - tensor(factor).dim()
    return _turned(graph, factor, (*[i for i in range(tensor(factor).dim()) if i != axis], axis))


def _unconverted(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What a factor was before Inductor converted it to float32. Where a model itself converts its
    weight nothing is rounded."""
    if is_call(node, prims.convert_element_type.default) and is_taken_apart(node):
        source: fx.Node = operand(node, 0)
        return source
    if not is_call(node, *RESHAPES, aten.permute.default):
        return node
    source = operand(node, 0)
    found = _unconverted(graph, source)
    return node if found is source else insert(graph, node.target, (found, *node.args[1:]), node)


def _weight(graph: fx.Graph, w: fx.Node, order: tuple[int, ...]) -> tuple[fx.Node, bool]:
    """(w as rows of outputs, False), or (w, True) if it is not a transposed one."""
    if is_call(w, aten.permute.default) and tuple(operand(w, 1)) == order:
        source: fx.Node = operand(w, 0)
        return source, False
    *_, along, across = tensor(w).stride()
    if along == 1 and (across != 1 or same(tensor(w).shape[-1], 1)):
        return _turned(graph, w, order), False
    return w, True


def _turned(graph: fx.Graph, node: fx.Node, order: tuple[int, ...]) -> fx.Node:
    """A tensor with its axes in another order."""
    if order == tuple(range(len(order))):
        return node
    return insert(graph, aten.permute.default, (node, list(order)), node)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What a product of matrices multiplies, whatever it adds."""
    unknown = set(node.kwargs) - {"alpha", "beta"}
    require(not unknown, f"it is given {', '.join(sorted(unknown))}")
    left, right = node.args[-2:]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return left, right


def addends(node: fx.Node) -> list[tuple[fx.Node | None, Any]]:
    """(None, alpha) for the product of a node that adds something to it, (b, beta) for that."""
    if not is_call(node, aten.addmm.default, aten.baddbmm.default):
        return []
    b: fx.Node = operand(node, 0)
    return [(None, node.kwargs.get("alpha", 1)), (b, node.kwargs.get("beta", 1))]


def sizes_of(graph: fx.Graph, node: fx.Node, *axes: int) -> list[Size]:
    """Sizes of a tensor along axes, as numbers or as nodes of the graph."""
    found: list[Size] = []
    for axis in axes:
        size = tensor(node).shape[axis]
        if isinstance(size, int):
            found.append(size)
        else:
            found.append(insert(graph, aten.sym_size.int, (node, axis), node))
    return found
