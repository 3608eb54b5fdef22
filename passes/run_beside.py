"""A shared expert that a sum adds to routed ones runs on a second stream, beside them.

Routed experts of few tokens wait for memory and for launches, and leave much of a GPU idle. The
pass puts `begin_shared` right behind the tokens and `await_shared` before the sum, both of
`moe_ops/streams.py`, where the option `beside` asks for it. Inductor orders what does not depend on
each other, and may put the former behind the experts: then it runs in order, and is as right.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from moe_ops import streams
from moe_ops.passes.rewriting.activation import SPELLINGS, Formula, identify
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    RESHAPES,
    Key,
    Mismatch,
    aten,
    between,
    call,
    each,
    expression,
    has_shape,
    insert,
    is_call,
    operand,
    ops,
    parameters_of,
    peel,
    prims,
    require,
    tensor,
    value,
)
from moe_ops.passes.rewriting.planned import waiting

RULE = "run_beside"
# Whose results a sum may add to that of a shared expert, and what may lie between.
ROUTED = tuple(
    getattr(op, name)
    for op in (ops.moe, ops.experts, ops.experts_over_ranks)
    for name in op.overloads()
)
SUMS = tuple(getattr(ops.sum_ranks, name) for name in ops.sum_ranks.overloads())
OF_TENSORS = (Tensor, tuple, list)
RESHAPED = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
PRODUCTS = (aten.mm.default, aten.addmm.default)
# Ops at which Inductor takes a graph apart, or whose results have sizes that the host waits for.
WAITING = {
    torch.Tag.cudagraph_unsafe, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """The node that adds a shared expert to what comes from the op `routed`; `last` is the last op
    between them that is a launch of its own. `shared` is the other term; None: the node is also the
    last product of the shared expert, of an input and a weight."""

    node: fx.Node
    routed: fx.Node
    last: fx.Node
    term: fx.Node
    shared: fx.Node | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """A shared expert as `begin_shared` takes it."""

    tokens: fx.Node
    w13: tuple[fx.Node, ...]
    w2: fx.Node
    gate: fx.Node | None
    kind: str

    @property
    def nbytes(self) -> int:
        """The bytes of the weights."""
        weights = (*self.w13, self.w2, *([] if self.gate is None else [self.gate]))
        return sum(tensor(w).nbytes for w in weights)


def run_beside(graph: fx.Graph, context: Context) -> int:
    """Run each shared expert that a sum adds to routed ones beside them, on GPUs."""
    if context.options.beside is False:
        return 0
    parameters = parameters_of(graph)
    sums = [sum_of(node) for node in graph.nodes if is_call(node, *ROUTED)]
    found = {s.node: s for s in sums if s is not None and is_expert_like(s)}
    if context.options.beside is None:  # nobody asked, and other devices have no streams
        found = {node: s for node, s in found.items() if has_streams(tensor(node).device)}

    def rewrite(node: fx.Node) -> str:
        return _rewrite(graph, found[node], parameters, context)

    return each(RULE, found, rewrite, context)


def has_streams(device: torch.device) -> bool:
    """Whether a device runs what it is given on several streams."""
    return device.type == "cuda"


def sum_of(routed: fx.Node) -> Sum | None:
    """The sum that alone reads what routed experts return, or None."""
    node = last = routed
    while len(node.users) == 1:
        (user,) = node.users
        if is_call(user, aten.add.Tensor):
            others = [a for a in user.args if a is not node]
            if len(others) != 1 or user.kwargs or not isinstance(others[0], fx.Node):
                return None
            return Sum(node=user, routed=routed, last=last, term=node, shared=others[0])
        if is_call(user, aten.addmm.default) and operand(user, 0) is node and not user.kwargs:
            return Sum(node=user, routed=routed, last=last, term=node, shared=None)
        if not is_call(user, *SUMS, *RESHAPES, prims.convert_element_type.default):
            return None
        node, last = user, user if is_call(user, *SUMS) else last
    return None


def is_expert_like(found: Sum) -> bool:
    """Whether what is added is a product, or a product times a gate, and not a residual."""
    if found.shared is None:
        return True
    node = peel(found.shared)
    factors = node.args if is_call(node, aten.mul.Tensor) else (node,)
    return any(is_call(peel(factor), *PRODUCTS) for factor in factors)


def _rewrite(graph: fx.Graph, found: Sum, parameters: set[fx.Node], context: Context) -> str:
    expert = read(found, parameters)
    device = tensor(expert.tokens).device
    require(has_streams(device), f"a {device.type} has no second stream")
    require(context.options.beside is True, streams.SLOWER)
    _require_joined(graph, expert, found)
    _insert(graph, found, expert)
    return f"{expert.nbytes / 2**20:.1f} MiB on a second stream: it is asked for"


def _require_joined(graph: fx.Graph, expert: SharedExpert, found: Sum) -> None:
    """Raise Mismatch where the host waits between the fork and the join: no CUDA graph of Inductor
    would hold both."""
    inside = itertools.dropwhile(lambda n: n is not expert.tokens, graph.nodes)
    for node in itertools.takewhile(lambda n: n is not found.node, inside):
        tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
        alone = waiting(node) is not None or not WAITING.isdisjoint(tags)
        require(not alone, f"the host waits for the device in {node.name}, which is beside it")


def _insert(graph: fx.Graph, found: Sum, expert: SharedExpert) -> None:
    """Put the pair of ops into the graph, and the result in the place of the shared expert's.

    Both take the tokens themselves, and no view of them: of a view that is not yet in memory
    Inductor would make a copy for each.
    """
    node, x = found.node, expert.tokens
    sizes = _sizes(tensor(x), node if found.shared is None else found.shared)
    with graph.inserting_before(_behind(x)):
        arguments = (x, list(expert.w13), expert.w2, expert.gate, expert.kind)
        shared = insert(graph, ops.begin_shared.default, arguments, node)
    with graph.inserting_before(node):
        insert(graph, ops.await_shared.default, (shared, x, found.last), node)
        if sizes is not None:
            shared = insert(graph, aten.reshape.default, (shared, sizes), node)
        if found.shared is not None:
            node.replace_input_with(found.shared, shared)
            return
        total = insert(graph, aten.add.Tensor, (found.term, shared), node)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _sizes(x: Tensor, replaced: fx.Node) -> Any:
    """The sizes, as a graph has them, that a result in the shape of the tokens is to have in the
    place of another node; None: those it has. Raises Mismatch if that is not known."""
    wanted = tensor(replaced)
    if has_shape(wanted, *x.shape[:-1], wanted.shape[-1]):
        return None
    if wanted.dim() == 2:
        return [-1, wanted.shape[1]]
    require(is_call(replaced, *RESHAPED), f"{replaced} has other axes than the tokens")
    return operand(replaced, 1)


def _behind(node: fx.Node) -> fx.Node:
    """The first node behind one and behind all inputs of the graph."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def read(found: Sum, parameters: set[fx.Node]) -> SharedExpert:
    """The shared expert that a sum adds. Raises Mismatch for what is none."""
    gates: list[tuple[fx.Node, fx.Node]] = []
    if found.shared is None:
        h, w2 = operand(found.node, 1), operand(found.node, 2)
        out, reader = h, found.node
    else:
        down, gate = _ungated(peel(found.shared))
        down = call(down, aten.mm.default, what="the last product of the shared expert")
        h, w2 = operand(down, 0), operand(down, 1)
        out, reader = found.shared, found.node
        gates = [] if gate is None else [_linear(gate, parameters)]
    firsts = _products_under(h)
    linears = [_linear(node, parameters) for node in firsts]
    roots = {peel(x) for x, _ in (*linears, *gates)}
    require(len(roots) == 1, "its products are of several inputs")
    (tokens,) = roots
    term = found.node if found.shared is None else found.shared
    same = has_shape(tensor(found.term), *tensor(term).shape)
    require(same, f"{list(tensor(term).shape)} is added to {list(tensor(found.term).shape)}")
    require(not _is_view(tokens), f"its tokens are a part of {tokens}")
    _require_alone(between(out, roots | parameters), reader, roots | parameters)
    kind, order = _activation(h, firsts)
    widths = {tensor(w).shape[0] for _, w in linears} if len(linears) == 2 else set()
    require(widths <= {tensor(h).shape[1]}, f"its products are {widths} wide")
    return SharedExpert(
        tokens=tokens, w13=tuple(linears[i][1] for i in order), w2=_weight(w2, parameters),
        gate=gates[0][1] if gates else None, kind=kind,
    )  # fmt: skip


def _is_view(node: fx.Node) -> bool:
    """Whether a node gives memory of its input."""
    target: Any = node.target
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(r.alias_info is not None for r in returns)


def _require_alone(inner: set[fx.Node], reader: fx.Node, leaves: set[fx.Node]) -> None:
    """Raise Mismatch if something else reads what a shared expert computes, and not only a view of
    what it is given: it would be computed twice."""
    for node in inner:
        others = node.users.keys() - inner - {reader}
        require(
            not others or peel(node) in leaves, f"{node} is also used by {next(iter(others), '')}"
        )


def _ungated(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The last product of a shared expert, and that of its gate [T, 1] if it has one."""
    if not is_call(node, aten.mul.Tensor):
        return node, None
    sides = [side for side in node.args if isinstance(side, fx.Node)]
    require(len(sides) == 2, "its result is scaled by a number")
    for down, gate in (sides, sides[::-1]):
        of_each = has_shape(tensor(gate), *tensor(down).shape[:-1], 1)
        if is_call(peel(down), *PRODUCTS) and of_each:
            return peel(down), _sigmoid_of(peel(gate))
    raise Mismatch("what its result is multiplied with is no gate")


def _sigmoid_of(gate: fx.Node) -> fx.Node:
    products = _products_under(gate)
    require(len(products) == 1, "its gate is not a sigmoid of a product")
    (product,) = products
    dtype = tensor(product).dtype
    same = expression(gate, {product: "y"}) == _traced(torch.sigmoid, dtype, ("y",))
    require(same, "its gate is not a sigmoid of a product")
    return product


def _products_under(node: Any) -> list[fx.Node]:
    """The products from which a node is computed, an op at a time, in the graph's order."""
    found, stack, seen = [], [node], set()
    while stack:
        one = stack.pop()
        if not isinstance(one, fx.Node) or one in seen or not isinstance(value(one), OF_TENSORS):
            continue  # a number or a size
        seen.add(one)
        if is_call(one, *PRODUCTS):
            found.append(one)
            continue
        require(one.op == "call_function", f"it also reads {one}")
        target: Any = one.target
        ours = getattr(target, "namespace", "") == "moe_ops"
        require(not ours, f"it computes with {target}, and only products of floats run beside")
        stack.extend(one.all_input_nodes)
    require(1 <= len(found) <= 2, f"it is made of {len(found)} products, not of one or two")
    return found


def _linear(node: fx.Node, parameters: set[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """Input and weight of a linear layer without a bias."""
    require(node.target is aten.mm.default, "its linear layers have biases")
    x = operand(node, 0)
    tensor(x)
    return x, _weight(operand(node, 1), parameters)


def _weight(transposed: Any, parameters: set[fx.Node]) -> fx.Node:
    permuted = call(transposed, aten.permute.default, what="a weight")
    require(list(operand(permuted, 1)) == [1, 0], "a weight is not a transposed one")
    w: fx.Node = operand(permuted, 0)
    require(w in parameters, f"the weight {w} is no parameter")
    return w


def _activation(h: Any, firsts: list[fx.Node]) -> tuple[str, tuple[int, ...]]:
    """The kind of the activation, and the order of the products: that of the gate first."""
    if len(firsts) == 1:
        found = identify(firsts[0], h)
        plain = not found.interleaved and found.limit is None and found.alpha == 1.0
        require(plain and found.kind in streams.ACTIVATIONS, f"its activation is {found.kind}")
        return found.kind, (0,)
    dtype = tensor(firsts[0]).dtype
    for order in ((0, 1), (1, 0)):
        names = {firsts[order[0]]: "gate", firsts[order[1]]: "up"}
        got = expression(h, names)
        for kind, traced in _gated(dtype):
            if got == traced:
                return kind, order
    raise Mismatch("the activation between its products is not one that is known")


@functools.cache
def _gated(dtype: torch.dtype) -> tuple[tuple[str, Key], ...]:
    """Gated activations of two products, as expressions."""
    found: Iterator[tuple[str, Key]] = itertools.chain.from_iterable(
        ((kind, _traced(form(act), dtype, ("gate", "up"))) for form in (_rounded, _in_float32))
        for kind, act in SPELLINGS
        if kind in streams.ACTIVATIONS
    )
    return tuple(found)


def _rounded(act: Formula) -> Any:
    return lambda gate, up: act(gate) * up


def _in_float32(act: Formula) -> Any:
    return lambda gate, up: (act(gate.float()) * up.float()).to(gate.dtype)


def _traced(formula: Any, dtype: torch.dtype, names: tuple[str, ...]) -> Key:
    """The expression of a formula of matrices, by these names, after Inductor's decompositions."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        given: list[Tensor] = [torch.empty(3, 4, dtype=dtype) for _ in names]
        graph = make_fx(formula, decomposition_table=select_decomp_table())(*given).graph
    placeholders = graph.find_nodes(op="placeholder")
    (out,) = graph.output_node().args
    return expression(out, dict(zip(placeholders, names, strict=True)))
