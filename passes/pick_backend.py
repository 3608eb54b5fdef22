"""Give every op of ours a backend, or one for each range of its number of rows.

An op that backends can run becomes `moe_ops::NAME.planned` with the choice baked in; if the number
of rows is not known when compiling, that op compares it with the plan's on the host. What no
backend takes is left for `lower`, which compiles its definition instead.

An op that writes to an argument is in a graph as a functional call, which gives what it would write
to as a result. Inductor makes it the op again, behind all passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import FUNCTIONAL, layer_of
from moe_ops.planning import tuned
from moe_ops.planning.choose import Node, Rules, choose
from moe_ops.registry.invariance import PLANNED
from moe_ops.registry.spec import NAMESPACE, OPS, Op

RULE = "pick_backend"
ORIGIN = ("nn_module_stack", "stack_trace", "from_node")  # where in the model a node comes from


def pick_backend(graph: fx.Graph, context: Context) -> int:
    """Replace ops by planned ones; record a choice for every op, those left for `lower` included.

    Raises ValueError for thresholds that give a node to a backend which cannot run it, and under
    `strict` and `batch_invariant` RuntimeError for a node that every backend refuses.
    """
    decided = {choice.node for choice in context.choices}
    nodes = [n for n in graph.nodes if generic_op(n) is not None and n.name not in decided]
    options = context.options
    table = tuned.load(options.tuned) if nodes else {}
    rules = Rules(thresholds=options.thresholds, strict=options.strict, table=table)
    count = 0
    for node in nodes:
        op = generic_op(node)
        assert op is not None
        call, place = call_of(op, node), Node(name=node.name, layer=layer_of(node))
        wanted = is_invariant(node) or (options.batch_invariant and not sums_rows(op))
        with context.for_all_sizes():
            choice = choose(op, call, place, replace(rules, batch_invariant=wanted))
        context.choices.append(choice)
        if not choice.is_definition:
            make_planned(graph, node, op, choice.plan)
            context.rewrote(RULE, node.name, choice.layer, f"{op.name}: {choice.text}")
            count += 1
    return count


def generic_op(node: fx.Node) -> Op | None:
    """The op that a node calls without a plan, or None."""
    target: Any = node.args[0] if is_functional(node) else node.target
    if node.op != "call_function" or getattr(target, "namespace", "") != NAMESPACE:
        return None
    op = OPS.get(target._schema.name.partition("::")[2])
    if op is None or (target is not op.overload and not is_invariant(node)):
        return None
    return op


def sums_rows(op: Op) -> bool:
    """Whether an op makes gradients, whose sums over rows belong to a batch."""
    return op.name.endswith("_backward") or op.name.startswith("expert_wgrad")


def is_invariant(node: fx.Node) -> bool:
    """Whether a node says that its call has to be batch invariant, and not yet by what."""
    return node.kwargs.get("plan") == PLANNED


def is_functional(node: fx.Node) -> bool:
    """Whether a node is the functional call of an op that writes to whole tensors, and not to views
    that it makes of them."""
    if node.target is not FUNCTIONAL:
        return False
    views = ("_size", "_slice_dim")
    return not any(name.startswith("_") and name.endswith(views) for name in node.kwargs)


def call_of(op: Op, node: fx.Node) -> Any:
    """The record of a node's arguments, tensors as the graph's fake ones."""
    args, kwargs = arguments_of(op, node)
    return op.call(*args, **{name: value for name, value in kwargs.items() if name != "plan"})


def arguments_of(op: Op, node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """A node's arguments, as the op or its overload with a plan takes them."""
    values: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = values
    if not is_functional(node):
        return args, dict(kwargs)
    places = {n: kwargs[f"_{n}_base_index"] for n in op.arguments.mutated}
    written = {n: None if i is None else kwargs["_all_bases"][i] for n, i in places.items()}
    return (), {n: a for n, a in kwargs.items() if not n.startswith("_")} | written


def make_planned(graph: fx.Graph, node: fx.Node, op: Op, plan: str) -> None:
    """Replace a node by the same op with a plan."""
    kwargs = {**node.kwargs, "plan": plan}
    if is_functional(node):
        node.args, node.kwargs = (op.planned,), kwargs
        seen = node.meta.get("eager_input_vals")
        if seen is not None:
            node.meta["eager_input_vals"] = (node.args, {**seen[1], "plan": plan})
        return
    with graph.inserting_before(node):
        new = graph.call_function(op.planned, node.args, kwargs)
    kept = ("val", "tensor_meta", "original_aten", *ORIGIN)
    new.meta.update({key: node.meta[key] for key in kept if key in node.meta})
    # Inductor holds an op's inputs to these strides, those by which the backends were asked.
    new.meta["eager_input_vals"] = fx.node.map_arg((new.args, kwargs), lambda n: n.meta["val"])
    node.replace_all_uses_with(new)
    graph.erase_node(node)
