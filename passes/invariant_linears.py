"""Linear layers that have to be batch invariant become the product of one expert.

Libraries of products sum in an order that depends on the number of rows. `expert_gemm` has backends
that do not, for any number of rows, those of a prompt and those of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from moe_ops.ops import expert_gemm
from moe_ops.passes.merge_linears import Linear, is_product, layer_in, replace_by
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    aten,
    each,
    insert,
    ops,
    parameters_of,
    require,
    tensor,
)
from moe_ops.registry.invariance import PLANNED, invariant

RULE = "invariant_linears"


def invariant_linears(graph: fx.Graph, context: Context) -> int:
    """Turn products with parameters into `expert_gemm` of one expert, where the options want calls
    to be batch invariant. What no backend computes so is left, with the reason."""
    if not context.options.batch_invariant:
        return 0
    parameters = parameters_of(graph)
    products = [node for node in graph.nodes if is_product(node)]

    def rewrite(node: fx.Node) -> str:
        linear = layer_in(node, parameters)
        _require_backend(linear)
        return _lift(graph, linear)

    with context.for_all_sizes():
        return each(RULE, products, rewrite, context)


def _require_backend(linear: Linear) -> None:
    """Raise Mismatch unless some backend computes a layer so."""
    x, ends = tensor(linear.x), torch.empty(1, dtype=torch.int32, device=tensor(linear.x).device)
    bias = None if linear.b is None else tensor(linear.b)[None]
    try:
        call = expert_gemm.call(x, tensor(linear.w)[None], ends, bias)
        expert_gemm.check(call)
        with invariant():
            expert_gemm.invariant(x.device.type, call)
    except (NotImplementedError, TypeError, ValueError) as reason:
        require(False, str(reason))


def _lift(graph: fx.Graph, linear: Linear) -> str:
    x, w, b, out = linear.x, linear.w, linear.b, linear.out
    with graph.inserting_before(out):
        rows: Any = tensor(x).shape[0]
        if not isinstance(rows, int):
            rows = insert(graph, aten.sym_size.int, (x, 0), out)
        ends = _end(graph, tensor(x), rows)
        w_EFD, *bias = [
            insert(graph, aten.unsqueeze.default, (t, 0), out) for t in (w, b) if t is not None
        ]
        arguments = (x, w_EFD, ends, *bias)
        y = insert(graph, ops.expert_gemm.planned, arguments, out, {"plan": PLANNED})
    replace_by(graph, out, y)
    graph.erase_node(out)
    return f"{list(tensor(x).shape)} x {list(tensor(w).shape)}"


def _end(graph: fx.Graph, x: torch.Tensor, rows: Any) -> fx.Node:
    """Where the rows of the one expert end, [1] in int32, given their number or a node of it."""
    kwargs: Any = {"dtype": torch.int32, "device": x.device}
    node = graph.call_function(aten.full.default, ([1], rows), kwargs)
    assert isinstance(x, FakeTensor)
    with x.fake_mode:
        node.meta["val"] = torch.full([1], x.shape[0], **kwargs)
    return node
