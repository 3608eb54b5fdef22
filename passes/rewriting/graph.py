"""Reading and writing post-grad graphs: what a node computes, who uses it, and new nodes.

Matching raises `Mismatch` with a reason in words; a rule that catches it leaves the graph alone.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_ops.passes.rewriting.context import Context

aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.moe_ops
# What calls an op that writes to an argument, and gives what it would write as a result.
FUNCTIONAL = torch.ops.higher_order.auto_functionalized_v2

# Ops that keep all elements in row-major order: they change the shape at most.
RESHAPES = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.clone.default,
        aten.alias.default,
    }
)


class Mismatch(Exception):
    """A region is not what a rule is for; the message says what differs."""


def require(condition: bool, reason: str) -> None:
    """Raise Mismatch unless the condition holds."""
    if not condition:
        raise Mismatch(reason)


def each(
    rule: str, nodes: Iterable[fx.Node], rewrite: Callable[[fx.Node], str], context: Context
) -> int:
    """Rewrite at every node where that is right. Returns how many were rewritten.

    `rewrite` says what it replaced, or raises Mismatch before it changes anything; both are
    recorded.
    """
    done = 0
    for node in nodes:
        name, layer = node.name, layer_of(node)
        try:
            context.rewrote(rule, name, layer, rewrite(node))
        except Mismatch as reason:
            context.refuse(rule, name, layer, str(reason))
        else:
            done += 1
    return done


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def call(node: Any, *targets: Any, what: str) -> fx.Node:
    """The node, which must call one of these. Raises Mismatch naming what it should have been."""
    if is_call(node, *targets):
        return node
    got = node.target if isinstance(node, fx.Node) and node.op == "call_function" else node
    raise Mismatch(f"{what} is {got}, not {' or '.join(str(t) for t in targets)}")


def arg(node: fx.Node, name: str) -> Any:
    """An argument of a call by its name in the schema; the default where it was left out."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, torch._ops.OpOverload)
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else argument.default_value
    raise KeyError(f"{node.target} has no argument {name}")


def operand(node: fx.Node, place: int) -> Any:
    """A positional argument of a call."""
    return node.args[place]


def value(node: fx.Node) -> Any:
    """The fake tensor (or number, or tuple) that a node stands for."""
    found = node.meta.get("val")
    if found is None:
        raise Mismatch(f"{node} has no meta value")
    return found


def tensor(node: Any) -> Tensor:
    """The fake tensor of a node. Raises Mismatch for anything else."""
    found = value(node) if isinstance(node, fx.Node) else None
    if not isinstance(found, Tensor):
        raise Mismatch(f"{node} is no tensor")
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal, without a guard."""
    return bool(statically_known_true(a == b))


def has_shape(t: Tensor, *sizes: Any) -> bool:
    """Whether a tensor is known to have this shape."""
    return t.dim() == len(sizes) and all(same(a, b) for a, b in zip(t.shape, sizes, strict=True))


def peel(node: Any) -> Any:
    """The node below reshapes: the same elements in the same row-major order."""
    while is_call(node, *RESHAPES):
        node = node.args[0]
    return node


def output(node: Any, index: int, *targets: Any, what: str) -> fx.Node:
    """The call whose output number `index` this node is. Raises Mismatch otherwise."""
    if not (is_call(node, operator.getitem) and node.args[1] == index):
        raise Mismatch(f"{what} is {node}, not output {index} of {targets[0]}")
    return call(node.args[0], *targets, what=what)


def between(out: fx.Node, leaves: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that `out` is computed from, itself included, down to the leaves, left out.

    Sizes are left out too. Raises Mismatch if another tensor input of the graph is reached.
    """
    stop, found, stack = set(leaves), set(), [out]
    while stack:
        node = stack.pop()
        if node in found or node in stop:
            continue
        if not isinstance(value(node), (Tensor, tuple, list)):
            continue  # a size
        if node.op != "call_function":
            raise Mismatch(f"it also reads {node}")
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found


def require_closed(region: set[fx.Node], out: fx.Node) -> None:
    """Raise Mismatch if a node of the region besides `out` is used outside of it.

    Constants and sizes may be: they are computed again where they are needed.
    """
    for node in region:
        if node is out or not any(isinstance(value(n), Tensor) for n in node.all_input_nodes):
            continue
        outside = [user for user in node.users if user not in region]
        if peel(node) not in region:  # a view of an input: asking for its size costs nothing
            outside = [user for user in outside if not is_call(user, aten.sym_size.int)]
        if outside:
            raise Mismatch(f"{node} is also used by {outside[0]}")


def parameters_of(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of the graph that stay where they are from call to call: no launch of the model
    writes them."""
    context = TracingContext.try_get()
    known = context.fw_metadata.static_input_indices if context and context.fw_metadata else []
    inputs = graph.find_nodes(op="placeholder")
    return {inputs[i] for i in known if i < len(inputs)}


def layer_of(node: fx.Node) -> str:
    """The innermost module that a node came from, such as model.layers.0.mlp.experts, or ""."""
    stack = node.meta.get("nn_module_stack") or {}
    return path_of(list(stack.values())[-1][0]) if stack else ""


@functools.lru_cache(2**14)
def path_of(path: str) -> str:
    """The name of a module by the path at which Dynamo found it, which it writes as
    L['self'].model.layers.slice(...)['0'] and the like."""
    words = re.sub(r"^L\['\w+'\]", "", path)
    return words.replace("._modules", "").replace("['", ".").replace("']", "").lstrip(".")


def insert(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    origin: fx.Node,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """A new call at the graph's insertion point, with its fake value, as if from `origin`'s module.

    `eager_input_vals` is set from the arguments, because Inductor keeps the strides of an op's
    inputs by it alone. Raises Mismatch, and inserts nothing, if the call does not take them.
    """
    fakes = fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = next((f.fake_mode for f in _leaves(fakes) if isinstance(f, FakeTensor)), None)
    if mode is None:
        raise Mismatch(f"{target} has no fake tensor among its arguments")
    try:
        with mode:
            val = target(*fakes, **(kwargs or {}))
    except (TypeError, ValueError) as error:
        raise Mismatch(str(error)) from error
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = val
    if isinstance(target, torch._ops.OpOverload):
        node.meta["eager_input_vals"] = (fakes, kwargs or {})
    for key in ("nn_module_stack", "stack_trace", "original_aten"):
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
    return node


def outputs(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes for each output of a call that has several."""
    return tuple(insert(graph, operator.getitem, (node, i), node) for i in range(len(value(node))))


def _leaves(values: Any) -> Iterable[Any]:
    return torch.utils._pytree.tree_leaves(values)


# Of sums and products the order of the operands has no meaning.
COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})
Key = Any  # nested tuples


def expression(node: Any, names: dict[fx.Node, str]) -> Key:
    """What a node computes from the named nodes, as nested tuples that can be compared.

    Reshapes are dropped, conversions joined, splits and chunks are slices, x * x is a square, and
    the operands of sums and products are sorted, so that two graphs of one formula have one
    expression. Raises Mismatch at an input that has no name.
    """
    memo: dict[fx.Node, Key] = dict(names.items())

    def read(x: Any) -> Key:
        if not isinstance(x, fx.Node):
            return str(x) if isinstance(x, torch.dtype) else x
        x = peel(x) if x not in memo else x
        if x not in memo:
            if x.op != "call_function":
                raise Mismatch(f"it also reads {x}")
            memo[x] = _call(x, read)
        return memo[x]

    return read(node)


def _call(node: fx.Node, read: Callable[[Any], Key]) -> Key:
    piece = _slice(node)
    if piece is not None:
        source, *where = piece
        if is_call(source, prims.convert_element_type.default):  # of a part is a part of it
            part = ("slice", read(source.args[0]), *where)
            return (str(source.target), part, read(source.args[1]))
        return ("slice", read(source), *where)
    if node.target is prims.convert_element_type.default:
        source, dtype = _uncast(node), node.args[1]
        cast = (str(node.target), read(source), str(dtype))
        return read(source) if tensor(source).dtype is dtype else cast
    args = tuple(read(a) if not isinstance(a, (list, tuple)) else tuple(map(read, a))
                 for a in node.args)  # fmt: skip
    kwargs = tuple(
        (k, read(v)) for k, v in sorted(node.kwargs.items())
        if k not in ("layout", "device", "pin_memory", "requires_grad")
    )  # fmt: skip
    if node.target is aten.pow.Tensor_Scalar and args[1] == 2:
        return ("aten.mul.Tensor", args[0], args[0])
    if node.target in COMMUTATIVE and not kwargs:
        args = tuple(sorted(args, key=repr))
    return (str(node.target), *args, *kwargs)


def _uncast(node: fx.Node) -> fx.Node:
    """What a conversion starts from, without those between: Inductor drops a rounding to fewer bits
    that is followed by one to more.
    """
    source, to = operand(node, 0), operand(node, 1)
    while is_call(source, prims.convert_element_type.default):
        if not (to.is_floating_point and operand(source, 1).is_floating_point):
            break
        source = operand(source, 0)
    return source


def _slice(node: fx.Node) -> tuple[fx.Node, int, int, int, int] | None:
    """A node as source[..., start:end:step] along an axis of known size, or None."""
    if is_call(node, aten.slice.Tensor):
        source = arg(node, "self")
        dim, start, end, step = (arg(node, name) for name in ("dim", "start", "end", "step"))
    elif is_call(node, operator.getitem) and is_call(
        node.args[0], aten.split.Tensor, aten.split_with_sizes.default
    ):
        split, place = operand(node, 0), operand(node, 1)
        source, dim, step = arg(split, "self"), arg(split, "dim"), 1
        if split.target is aten.split.Tensor:
            start = arg(split, "split_size") * place
            end = start + arg(split, "split_size")
        else:
            sizes = arg(split, "split_sizes")
            start = sum(sizes[:place])
            end = start + sizes[place]
    else:
        return None
    t = tensor(source)
    size = t.shape[dim]
    if not isinstance(size, int):
        return None
    start, end = (
        max(0, min(size, n + size if n < 0 else n))
        for n in (start or 0, size if end is None else end)
    )
    return source, dim % t.dim() - t.dim(), start, end, step
