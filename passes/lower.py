"""Compile the definition of what no backend takes, so that no op stays opaque by accident.

The definition of a fused op is made of stages, which may have backends again; the others are ATen,
which Inductor fuses with its neighbours.
"""

from __future__ import annotations

import logging
import math
import operator
from typing import Any

from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from moe_ops.passes.pick_backend import (
    ORIGIN,
    call_of,
    generic_op,
    is_functional,
    make_planned,
    pick_backend,
)
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import layer_of
from moe_ops.planning.choose import GUARDS, no_new_guards
from moe_ops.registry.spec import NAMESPACE, REFERENCE, Op

RULE = "lower"
# The definitions of `expert_gemm` and `expert_wgrad` have a weight for every row; with more bytes
# than these they are run as they are, one op at a time, where memory is given back.
MOST_GATHERED = 2**24


def lower(graph: fx.Graph, context: Context) -> int:
    """Replace every op without a plan by its definition, and plan the ops in it.

    Under `strict` raises RuntimeError for a definition that cannot be compiled.
    """
    pick_backend(graph, context)
    count = 0
    while nodes := [node for node in graph.nodes if generic_op(node) is not None]:
        for node in nodes:
            op = generic_op(node)
            assert op is not None
            _lower_one(graph, node, op, context)
        count += len(nodes)
        pick_backend(graph, context)
    return count


def _lower_one(graph: fx.Graph, node: fx.Node, op: Op, context: Context) -> None:
    layer, name = layer_of(node), node.name
    reason = "it writes to an argument" if is_functional(node) else _too_large(op, node)
    if reason is None:
        try:
            traced = _definition(op, node)
        except GUARDS:
            reason = "its definition decides by a size that is not known when compiling"
        else:
            _inline(graph, node, traced)
            context.rewrote(RULE, name, layer, f"{op.name}: its definition")
            return
    if context.options.strict:
        raise RuntimeError(f"strict: {NAMESPACE}.{op.name} (node {name}) stays opaque: {reason}")
    make_planned(graph, node, op, REFERENCE)
    text = f"{op.name} runs on its reference: {reason}"
    context.refuse(RULE, name, layer, text, logging.INFO)


def _too_large(op: Op, node: fx.Node) -> str | None:
    """Why the definition of an op takes too much memory to be compiled, or None."""
    call = call_of(op, node)
    if op.name == "expert_gemm":
        sizes = (call.x_RD.shape[0], *call.w_EFD.shape[1:])
    elif op.name == "expert_wgrad":
        sizes = (call.rows, call.a_RM.shape[1], call.b_RN.shape[1])
    else:
        return None
    if not all(isinstance(n, int) for n in sizes):
        return "its definition gathers a weight for each of an unknown number of rows"
    gathered = math.prod(sizes) * 4
    if gathered <= MOST_GATHERED:
        return None
    return f"its definition gathers {gathered / 2**20:.4g} MiB of weights"


def _definition(op: Op, node: fx.Node) -> fx.GraphModule:
    """The definition of an op as a graph; its inputs are those of the node, in order."""
    inputs = node.all_input_nodes
    fakes = [n.meta["val"] for n in inputs]
    mode = next(t.fake_mode for t in fakes if isinstance(t, FakeTensor))

    def body(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        return op.reference(*args, **kwargs)

    with mode, enable_python_dispatcher(), no_new_guards(fakes):
        traced = make_fx(body, select_decomp_table(), tracing_mode="real")(*fakes)
    # Inductor removed those of the model before this pass; torch 2.11 cannot compile a slice that
    # takes all of an unknown number of rows, which `t[:, None]` leaves behind.
    remove_noop_ops(traced.graph)
    traced.graph.eliminate_dead_code()
    return traced


def _inline(graph: fx.Graph, node: fx.Node, traced: fx.GraphModule) -> None:
    """Copy a graph in place of a node."""
    origin = {key: node.meta[key] for key in ORIGIN if key in node.meta}
    env: dict[fx.Node, fx.Node] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True)
    )
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, env.__getitem__)
                env[inner].meta.update(origin)
            else:
                assert inner.op in ("placeholder", "output"), f"{node} has the constant {inner}"
    outputs: Any = fx.node.map_arg(traced.graph.output_node().args[0], env.__getitem__)
    if isinstance(outputs, fx.Node):
        node.replace_all_uses_with(outputs)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} takes all outputs of {node}"
            index: Any = user.args[1]
            user.replace_all_uses_with(outputs[index])
            graph.erase_node(user)
    graph.erase_node(node)
