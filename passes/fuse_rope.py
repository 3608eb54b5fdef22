"""Rotary positions of one query and its key, what is put into a cache, and attention become one
op.

Between the projections of a step and its attention lie the norms of heads, their rotation and two
writes of a slot. Each is a launch of about a microsecond, most of it spent waiting for the one
before. One op can also prefetch the cache while the projections run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from moe_ops.decode_ops.rope_attention import DTYPES, refusal, rope_attention
from moe_ops.passes.fuse_norm import read as read_norm
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    Mismatch,
    arg,
    aten,
    call,
    each,
    expression,
    insert,
    is_call,
    operand,
    ops,
    parameters_of,
    peel,
    require,
    tensor,
)
from moe_ops.passes.rewriting.planned import plan_by

RULE = "fuse_rope"
VIEWS = (
    aten.reshape.default,
    aten.view.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
    aten.permute.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.alias.default,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """Heads [B, N, 1, D] turned by angles: of `x` [.., N * D], normed with a gain if there is
    one."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    gain: fx.Node | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """`cache`, an input of the graph, with `new` in a slot; `back` makes that input of it."""

    cache: fx.Node
    slot: fx.Node
    new: fx.Node
    back: fx.Node


def fuse_rope(graph: fx.Graph, context: Context) -> int:
    """Turn a `one_query`, and what it reads, a query and caches into which a key and a value are
    put, into one `rope_attention`, which changes the caches where they are."""
    nodes = graph.find_nodes(op="call_function", target=ops.one_query.default)
    parameters = parameters_of(graph)
    return each(RULE, nodes, lambda node: _fuse(graph, node, parameters, context), context)


def _fuse(graph: fx.Graph, attention: fx.Node, parameters: set[fx.Node], context: Context) -> str:
    keys, values = (written(operand(attention, place), attention) for place in (1, 2))
    require(peel(keys.slot) is peel(values.slot), "the key and the value go into two slots")
    require(keys.cache is not values.cache, "keys and values are one cache")
    (B, H, _), N = tensor(operand(attention, 0)).shape, tensor(keys.cache).shape[1]
    q = turned(peel(operand(attention, 0)), B, H, parameters)
    k = turned(peel(keys.new), B, N, parameters)
    require(peel(q.cos) is peel(k.cos) and peel(q.sin) is peel(k.sin), "q and k have two positions")
    require(q.gain is None or k.gain is None or q.eps == k.eps, "q and k have two epsilons")
    value = heads(values.new, B, N)
    D, DV = (tensor(w.cache).shape[3] for w in (keys, values))
    # What to reshape, and how.
    inputs: list[tuple[Any, list[Any]]] = [
        (q.x, [B, H, D]),
        (k.x, [B, N, D]),
        (value, [B, N, DV]),
        (q.cos, [-1, tensor(q.cos).shape[-1]]),
        (q.sin, [-1, tensor(q.sin).shape[-1]]),
        (keys.slot, [1]),
    ]
    # The slot, the mask and the caches are read early, so what wrote them needs a launch after it:
    # that of a projection.
    computed = any(peel(node).op == "call_function" for node in (q.x, k.x, value))
    require(computed, "queries, keys and values are inputs, so nothing is launched before")
    mask, sinks = operand(attention, 3), arg(attention, "sinks_H")
    for what, node in (("mask", mask), ("slot", keys.slot)):
        require(is_input(node), f"the {what} is no input")
    caches = (keys.cache, values.cache, mask)
    require(tensor(q.x).dtype in DTYPES, f"the queries are {tensor(q.x).dtype}")
    fakes: list[Any] = [tensor(node).reshape(shape) for node, shape in inputs]
    fakes += [tensor(node) for node in caches]
    options = (operand(attention, 4), q.gain, k.gain, q.eps, sinks)
    fakes += fx.node.map_arg(options, tensor)
    turning = rope_attention.call(*fakes)
    reason = refusal(turning)
    require(reason is None, str(reason))
    plan = plan_by(context, rope_attention, "triton", turning)
    with graph.inserting_before(attention):
        rows = [insert(graph, aten.reshape.default, pair, attention) for pair in inputs]
        arguments = (*rows, *caches, *options)
        fused = insert(graph, ops.rope_attention.planned, arguments, attention, plan)
    attention.replace_all_uses_with(fused)
    graph.erase_node(attention)
    for write in (keys, values):
        graph.erase_node(write.back)
    return f"{B} x {H} + {2 * N} heads{'' if q.gain is None else ', normed'}"


def is_input(node: Any) -> bool:
    """Whether a node is an input of the graph, or a view of one, and so was written before the
    graph begins."""
    while is_call(node, *VIEWS):
        node = operand(node, 0)
    return isinstance(node, fx.Node) and node.op == "placeholder"


def written(out: Any, attention: fx.Node) -> Written:
    """How a cache that attention reads was written. Raises Mismatch unless it is an input of the
    graph which nothing else reads or writes."""
    out = call(out, aten.index_put.default, what="the cache")
    cache, indices, new = out.args[:3]
    require(not arg(out, "accumulate"), "it is added to the cache")
    require(cache.op == "placeholder", "the cache is no input")
    require(
        len(indices) == 3 and indices[:2] == [None, None] and indices[2] is not None,
        "it is no slot that is written",
    )
    slot = indices[2]
    require(tuple(tensor(slot).shape) == (1,), "several slots are written")
    back = [n for n in out.users if is_call(n, aten.copy_.default) and n.args[0] is cache]
    require(
        len(back) == 1 and set(out.users) == {attention, *back} and not back[0].users,
        "something else reads the cache",
    )
    require(set(cache.users) == {out, *back}, "something else reads the cache as it was")
    return Written(cache=cache, slot=slot, new=new, back=back[0])


def turned(out: fx.Node, B: Any, N: Any, parameters: set[fx.Node]) -> Turned:
    """How heads [B, N, 1, D] were turned. Raises Mismatch for any other way.

    x * cos + cat([-x[D/2:], x[:D/2]]) * sin, with angles of D numbers, or, with those of D / 2,
    cat([x[:D/2] * cos - x[D/2:] * sin, x[D/2:] * cos + x[:D/2] * sin])
    """
    D = tensor(out).shape[-1]
    require(tuple(tensor(out).shape) == (B, N, 1, D) and D % 2 == 0, "they are no heads")
    whole = is_call(out, aten.add.Tensor)
    x, cos, sin = _of_whole(out) if whole else _of_halves(out)
    width = D if whole else D // 2
    names = {x: "x", cos: "cos", sin: "sin"}
    require(len(names) == 3, "angles and heads are one")
    first, second = (("slice", "x", -1, a, a + D // 2, 1) for a in (0, D // 2))
    if whole:
        other = ("aten.cat.default", (("aten.neg.default", second), first), -1)
        want = _sum(_product("x", "cos"), _product(other, "sin"))
    else:
        difference = ("aten.sub.Tensor", _product(first, "cos"), _product(second, "sin"))
        total = _sum(_product(second, "cos"), _product(first, "sin"))
        want = ("aten.cat.default", (difference, total), -1)
    require(expression(out, names) == want, "they are turned in another way")
    for angle in (cos, sin):
        shape = tuple(tensor(angle).shape)
        require(shape in ((1, 1, 1, width), (B, 1, 1, width)), f"the angles are {shape}")
    norm = _norm_of(heads(x, B, N), B, N, D, parameters)
    return Turned(x=norm[0], cos=cos, sin=sin, gain=norm[1], eps=norm[2])


def _norm_of(
    node: fx.Node, B: Any, N: Any, D: Any, parameters: set[fx.Node]
) -> tuple[fx.Node, fx.Node | None, float]:
    """(x, gain, epsilon) of heads that are normed each for itself with a parameter, as the op reads
    the gain before the launch before has ended; of others they are read as they are:
    (node, None, 0)."""
    if not is_call(peel(node), aten.mul.Tensor):
        return node, None, 0.0
    try:
        norm = read_norm(peel(node))
    except Mismatch:
        return node, None, 0.0
    shapes = {tuple(tensor(n).shape) for n in (norm.s, norm.out)}
    if shapes != {(B, 1, N, D)} or tuple(tensor(norm.gain).shape) != (D,):
        return node, None, 0.0
    if norm.gain not in parameters:
        return node, None, 0.0
    return norm.s, norm.gain, norm.eps


def heads(node: Any, B: Any, N: Any) -> fx.Node:
    """[B, 1, N, D], of which a node is the transpose [B, N, 1, D]."""
    node = call(node, aten.permute.default, what="the heads")
    source = operand(node, 0)
    require(
        list(operand(node, 1)) == [0, 2, 1, 3]
        and tuple(tensor(source).shape[:3]) == (B, 1, N)
        and isinstance(source, fx.Node),
        "they are no heads of one token",
    )
    return source


def _of_whole(out: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(x, cos, sin) of x * cos + cat(...) * sin, if it is that."""
    terms = [call(term, aten.mul.Tensor, what="a term") for term in out.args[:2]]
    for plain, other in (terms, terms[::-1]):
        for sin, cat in (other.args[:2], other.args[1::-1]):
            pieces: Any = cat.args[0] if is_call(cat, aten.cat.default) else ()  # type: ignore[union-attr]
            if len(pieces) != 2:
                continue
            x = _source(pieces[1])
            for a, b in (plain.args[:2], plain.args[1::-1]):
                if a is x and isinstance(b, fx.Node) and isinstance(sin, fx.Node):
                    return x, b, sin
    raise Mismatch("it is no rotation of halves")


def _of_halves(out: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(x, cos, sin) of cat([x₁ cos - x₂ sin, ...]), if it is that."""
    pieces = operand(call(out, aten.cat.default, what="the heads"), 0)
    difference = call(pieces[0], aten.sub.Tensor, what="the first half")
    found: list[Any] = []
    for term in difference.args[:2]:
        half, angle = call(term, aten.mul.Tensor, what="a term").args[:2]
        require(isinstance(half, fx.Node) and isinstance(angle, fx.Node), "a factor is a number")
        found.append((_source(half), angle))
    (x, cos), (also, sin) = found
    require(x is also, "it is no rotation of halves")
    return x, cos, sin


def _source(piece: Any) -> fx.Node:
    """What a slice, or one of the outputs of a split, is a part of."""
    if is_call(piece, aten.slice.Tensor):
        return operand(piece, 0)
    if isinstance(piece, fx.Node) and piece.all_input_nodes:
        split = piece.all_input_nodes[0]
        if is_call(split, aten.split.Tensor, aten.split_with_sizes.default):
            return operand(split, 0)
    raise Mismatch(f"{piece} is no part of a head")


def _product(a: Any, b: Any) -> Any:
    return ("aten.mul.Tensor", *sorted((a, b), key=repr))


def _sum(a: Any, b: Any) -> Any:
    return ("aten.add.Tensor", *sorted((a, b), key=repr))
