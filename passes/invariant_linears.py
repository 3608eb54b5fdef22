"""Products with weights that have to be batch invariant become those of experts.

Libraries of products sum in an order that depends on the number of rows. `expert_gemm` has backends
that do not, for any number of rows, those of a prompt and those of a step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from moe_ops.ops import expert_gemm
from moe_ops.passes.merge_linears import replace_by
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    aten,
    each,
    insert,
    ops,
    prims,
    require,
    tensor,
)
from moe_ops.passes.rewriting.products import (
    Product,
    addends,
    multiplies_weights,
    product_of,
    sizes_of,
    weights_of,
)
from moe_ops.registry.invariance import PLANNED, invariant

RULE = "invariant_linears"


def invariant_linears(graph: fx.Graph, context: Context) -> int:
    """Turn products with parameters, and with what is made of parameters alone, into `expert_gemm`,
    where the options want calls to be batch invariant. Raises NotImplementedError for those that no
    backend computes so."""
    if not context.options.batch_invariant:
        return 0
    weights = weights_of(graph)
    products = [node for node in graph.nodes if multiplies_weights(node, weights)]

    def rewrite(node: fx.Node) -> str:
        product = product_of(graph, node, weights)
        _require_backend(product)
        return _lift(graph, product)

    with context.for_all_sizes():
        done = each(RULE, products, rewrite, context)
    for left in context.refusals:
        if left.rule == RULE:
            raise NotImplementedError(
                f"batch_invariant: no backend gives {left.node}, a product with a weight in "
                f"{left.layer or 'the graph'}, the same bits in any batch: {left.text}"
            )
    return done


def _require_backend(product: Product) -> None:
    """Raise Mismatch unless some backend computes a product so."""
    x, w = tensor(product.x), tensor(product.w)
    w = w if w.dim() == 3 else w[None]
    ends = torch.empty(w.shape[0], dtype=torch.int32, device=x.device)
    try:
        call = expert_gemm.call(x, w, ends, None, product.transposed)
        expert_gemm.check(call)
        with invariant():
            expert_gemm.invariant(x.device.type, call)
    except (NotImplementedError, TypeError, ValueError) as reason:
        require(False, str(reason))


def _lift(graph: fx.Graph, product: Product) -> str:
    x, w, out = product.x, product.w, product.out
    with graph.inserting_before(out):
        ends = product.ends or _ends(graph, product)
        one = tensor(w).dim() == 2
        w_EFD = insert(graph, aten.unsqueeze.default, (w, 0), out) if one else w
        arguments = (x, w_EFD, ends, *((None, True) if product.transposed else ()))
        y = insert(graph, ops.expert_gemm.planned, arguments, out, {"plan": PLANNED})
        if len(product.shape) != 2:
            y = insert(graph, aten.reshape.default, (y, list(product.shape)), out)
        if product.columns:
            turned = [*range(len(product.shape) - 2), -1, -2]
            y = insert(graph, aten.permute.default, (y, turned), out)
        if addends(out):
            y = _sum(graph, y, out)
        replace_by(graph, out, y)
    graph.erase_node(out)
    return f"{list(tensor(x).shape)} x {list(tensor(w).shape)}"


def _sum(graph: fx.Graph, y: fx.Node, out: fx.Node) -> fx.Node:
    """alpha y + beta b, of the rounded y: so what Inductor joins to one product, and what it leaves
    as a product and a sum, has the same bits."""
    dtype, terms = tensor(y).dtype, []
    for term, factor in addends(out):
        term = y if term is None else term
        if dtype is not torch.float32:
            term = insert(graph, prims.convert_element_type.default, (term, torch.float32), out)
        if factor != 1:
            term = insert(graph, aten.mul.Tensor, (term, factor), out)
        terms.append(term)
    total = insert(graph, aten.add.Tensor, tuple(terms), out)
    if dtype is not torch.float32:
        total = insert(graph, prims.convert_element_type.default, (total, dtype), out)
    return total


def _ends(graph: fx.Graph, product: Product) -> fx.Node:
    """Where the rows of each weight end, in int32: all rows, or equal parts of them."""
    x, out = product.x, product.out
    if tensor(product.w).dim() == 2:
        return _end(graph, tensor(x), sizes_of(graph, x, 0)[0])
    E, (rows,) = tensor(product.w).shape[0], sizes_of(graph, x, 0)
    if isinstance(rows, int):
        rows //= E
    else:
        rows, of_all = graph.call_function(operator.floordiv, (rows, E)), rows
        rows.meta["val"] = of_all.meta["val"] // E
    kwargs: Any = {"dtype": torch.int32, "device": tensor(x).device}
    counted = {"start": 1, "step": 1, "requires_grad": False} | kwargs
    numbers = graph.call_function(prims.iota.default, (E,), counted)
    fake = tensor(x)
    assert isinstance(fake, FakeTensor)
    with fake.fake_mode:
        numbers.meta["val"] = torch.arange(1, E + 1, **kwargs)
    return insert(graph, aten.mul.Tensor, (numbers, rows), out)


def _end(graph: fx.Graph, x: torch.Tensor, rows: Any) -> fx.Node:
    """Where the rows of the one expert end, [1] in int32, given their number or a node of it."""
    kwargs: Any = {"dtype": torch.int32, "device": x.device}
    node = graph.call_function(aten.full.default, ([1], rows), kwargs)
    assert isinstance(x, FakeTensor)
    with x.fake_mode:
        node.meta["val"] = torch.full([1], x.shape[0], **kwargs)
    return node
