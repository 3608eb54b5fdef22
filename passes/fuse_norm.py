"""The norm of a few rows, and the sum before it, become a part of the linear layers that read it.

Each is too small for a launch: that, and what a launch waits for the one before, is all it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moe_ops.backends.triton_linears import supports_normed
from moe_ops.decode_ops.linears import MOST_ROWS
from moe_ops.decode_ops.normed_linears import NormedLinearsCall, normed_linears
from moe_ops.decode_ops.normed_linears import refusal as refusal_of_linears
from moe_ops.decode_ops.normed_quantized_linears import (
    NormedQuantizedLinearsCall,
    normed_quantized_linears,
)
from moe_ops.decode_ops.normed_quantized_linears import refusal as refusal_of_codes
from moe_ops.passes.merge_linears import runs_kernels
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import (
    arg,
    aten,
    call,
    each,
    insert,
    is_call,
    operand,
    ops,
    outputs,
    parameters_of,
    peel,
    prims,
    require,
    require_closed,
    tensor,
)
from moe_ops.passes.rewriting.planned import plan_by
from moe_ops.registry.spec import Op

RULE = "fuse_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """`out` is gain · (s / rms(s)), rounded as `normed_linears` does with this `shift` of the gain;
    `inner` are the nodes from s, left out, to `out`."""

    out: fx.Node
    s: fx.Node
    gain: fx.Node
    eps: float
    shift: float | None
    inner: set[fx.Node]


def fuse_norm(graph: fx.Graph, context: Context) -> int:
    """Turn each RMS norm of up to 64 rows that a `linears` reads, and that `linears`, into
    `normed_linears`, with the sum that is normed if there is one; and that of a
    `quantized_linears` which a GPU runs into `normed_quantized_linears`.

    A norm that both read goes into the launch that comes first."""
    parameters = parameters_of(graph)
    found = {ops.linears.planned, ops.quantized_linears.planned}
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.target in found]
    products = filter(is_of_a_product, nodes)
    return each(RULE, products, lambda node: _fuse(graph, node, parameters, context), context)


def is_of_a_product(linears: fx.Node) -> bool:
    """Whether the input is a few rows and a product, as what a norm ends with is, rounded or not,
    of a device with kernels."""
    x = operand(linears, 0)
    T = tensor(x).shape[0]
    few = isinstance(T, int) and T <= MOST_ROWS and runs_kernels(tensor(x).device)
    return few and is_call(unconverted(peel(x)), aten.mul.Tensor)


def unconverted(node: Any) -> Any:
    """What a conversion starts from, or the node that is none."""
    return operand(node, 0) if is_call(node, prims.convert_element_type.default) else node


def read(out: fx.Node) -> Norm:
    """The norm that a product of a gain and something else is. Raises Mismatch for others.

    s = x.float();  gain * (s * rsqrt(s.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    or, rounded once, with a gain in float32 or one that is converted to it, and a shift or none

    (s * rsqrt(s.pow(2).mean(-1, keepdim=True) + eps) * (gain.float() + shift)).to(x.dtype)
    """
    if is_call(out, aten.mul.Tensor):
        gain, rounded = _either(out, prims.convert_element_type.default, "the normed row")
        quotient, shift, inner = operand(rounded, 0), None, {out, rounded}
    else:
        rounded = call(out, prims.convert_element_type.default, what="the normed row")
        product = call(operand(rounded, 0), aten.mul.Tensor, what="the normed row")
        factor, quotient = _either(product, aten.mul.Tensor, "the normed row")
        require(tensor(product).dtype is torch.float32, "the gain is not of float32")
        (gain, shift), inner = _shifted(factor), {out, product}
    require(isinstance(gain, fx.Node) and gain.op == "placeholder", "the gain is no parameter")
    s, eps, nodes = _read_quotient(quotient)
    dtype = tensor(s).dtype
    require(tensor(rounded).dtype is dtype is tensor(out).dtype, "it rounds to another dtype")
    inner |= nodes
    require_closed(inner, out)
    return Norm(out=out, s=s, gain=gain, eps=eps, shift=shift, inner=inner)


def _shifted(factor: Any) -> tuple[Any, float]:
    """The gain of a sum of a gain and a number in float32, and that number; the gain and 0 where it
    is no sum. Raises Mismatch for other sums and roundings."""
    shift: Any = 0.0
    if is_call(factor, aten.add.Tensor):
        require(tensor(factor).dtype is torch.float32, "the shifted gain is rounded")
        require(not factor.kwargs, "the gain is another sum")
        factor, shift = factor.args
        require(isinstance(shift, (int, float)), "the gain is another sum")
    gain = unconverted(factor)
    require(gain is factor or tensor(factor).dtype is torch.float32, "the gain is rounded")
    return gain, float(shift)


def _read_quotient(quotient: Any) -> tuple[fx.Node, float, set[fx.Node]]:
    """s, eps and the nodes of s / sqrt(mean(s²) + eps) in float32. Raises Mismatch for others."""
    quotient = call(quotient, aten.mul.Tensor, what="the normed row")
    wide, inverse = _either(quotient, aten.rsqrt.default, "the inverse of the norm")
    shifted = call(operand(inverse, 0), aten.add.Tensor, what="the mean and epsilon")
    mean, eps = operand(shifted, 0), operand(shifted, 1)
    require(isinstance(eps, float) and not shifted.kwargs, f"epsilon is {eps}")
    mean = call(mean, aten.mean.dim, what="the mean")
    require(
        list(operand(mean, 1)) == [-1] and arg(mean, "keepdim") and arg(mean, "dtype") is None,
        "the mean is another",
    )
    square = call(operand(mean, 0), aten.pow.Tensor_Scalar, what="the square")
    require(operand(square, 0) is wide and operand(square, 1) == 2, "another row is squared")
    wide = call(wide, prims.convert_element_type.default, what="the row in float32")
    require(tensor(wide).dtype is torch.float32, "the norm is not of float32")
    return operand(wide, 0), eps, {quotient, inverse, shifted, mean, square, wide}


def _either(node: fx.Node, target: Any, what: str) -> tuple[Any, fx.Node]:
    """The operands of a product, that which calls `target` as the second."""
    a, b = node.args[:2]
    if is_call(a, target) and not is_call(b, target):
        a, b = b, a
    return a, call(b, target, what=what)


def _fuse(graph: fx.Graph, linears: fx.Node, parameters: set[fx.Node], context: Context) -> str:
    norm = read(peel(operand(linears, 0)))
    # It is read ahead of the end of the launch before.
    require(norm.gain in parameters, f"the gain {norm.gain} is no parameter")
    # So may the rest be, which is needed where the norm is.
    others = [t for t in linears.all_input_nodes if t is not operand(linears, 0)]
    computed = [t for t in others if t not in parameters]
    require(not computed, f"{computed and computed[0]} is no parameter")
    require(tensor(norm.s).shape == tensor(norm.out).shape, "the gain has rows of its own")
    terms = _terms(graph, norm)
    weights: Any = operand(linears, 1)
    shape = list(tensor(operand(linears, 0)).shape)
    fakes = [tensor(term).reshape(shape) for term in terms]
    layers: Any = fx.node.map_arg(linears.args[1:], tensor)
    terms_of = (fakes[0], fakes[1] if len(fakes) > 1 else None)
    given: Any = (*terms_of, tensor(norm.gain), norm.eps, *layers, norm.shift)
    target: Op = normed_linears
    if is_call(linears, ops.quantized_linears.planned):
        target, of_codes = normed_quantized_linears, NormedQuantizedLinearsCall(*given)
        reason = refusal_of_codes(of_codes) or supports_normed(of_codes)
    else:
        reason = refusal_of_linears(NormedLinearsCall(*given))
    require(reason is None, str(reason))
    plan = plan_by(context, target, "triton", target.call(*given))
    with graph.inserting_before(norm.out):
        rows = [insert(graph, aten.reshape.default, (term, shape), norm.out) for term in terms]
        first = (*rows, *[None] * (2 - len(rows)))
        arguments = (*first, norm.gain, norm.eps, *linears.args[1:], norm.shift)
        fused = insert(graph, target.planned, arguments, linears, plan)
        results = outputs(graph, fused)
        *sums, normed = results[: len(rows)]
        ys = results[len(rows) :]
        shaped = [
            insert(graph, aten.reshape.default, (row, list(tensor(node).shape)), node)
            for row, node in ((normed, norm.out), *((row, norm.s) for row in sums))
        ]
    for user in list(linears.users):
        index: Any = operand(user, 1)
        user.replace_all_uses_with(ys[index])
        graph.erase_node(user)
    graph.erase_node(linears)
    norm.out.replace_all_uses_with(shaped[0])
    for node in [n for n in reversed(graph.nodes) if n in norm.inner]:
        graph.erase_node(node)
    if sums:
        norm.s.replace_all_uses_with(shaped[1])
    return f"a norm{' of a sum' if sums else ''} and {len(weights)} products"


def _terms(graph: fx.Graph, norm: Norm) -> list[fx.Node]:
    """What the op adds before it norms: the terms of a sum, if all that reads the sum comes after
    the norm and the sum rounds as the op does; else the row alone."""
    s = norm.s
    if not is_call(s, aten.add.Tensor) or s.kwargs:
        return [s]
    terms = [term for term in s.args if isinstance(term, fx.Node)]
    kind = tensor(s).shape, tensor(s).dtype
    if len(terms) != 2 or any((tensor(t).shape, tensor(t).dtype) != kind for t in terms):
        return [s]
    later = set()
    for node in reversed(graph.nodes):
        if node is norm.out:
            break
        later.add(node)
    return terms if set(s.users) <= later | norm.inner else [s]
