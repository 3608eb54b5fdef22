"""Reading score functions: softmax, sigmoid and sqrt(softplus) as post-grad graphs hold them.

What cannot be read is None, so that the caller may take it as it is; nothing here raises Mismatch
but `bare` and `in_float32`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from moe_ops.passes.rewriting.graph import (
    RESHAPES,
    arg,
    aten,
    has_shape,
    is_call,
    prims,
    require,
    tensor,
)

NARROW = (torch.bfloat16, torch.float16)


def read_score(node: fx.Node) -> tuple[str, fx.Node]:
    """The score function that a [T, E] tensor is the result of, and the logits that it is of.

    A tensor that is the result of none is its own logits, and the score function "logit".
    """
    shape = tensor(node).shape
    x = read_softmax(node)
    if x is not None:
        return "softmax", bare(x, *shape)
    elementwise = read_elementwise(node)
    if elementwise is not None:
        return elementwise[0], bare(elementwise[1], *shape)
    return "logit", node


def read_softmax(node: fx.Node) -> fx.Node | None:
    """The x of softmax(x) over the last axis, in float32, or None."""
    if tensor(node).dtype is not torch.float32 or not is_call(node, aten.div.Tensor):
        return None
    exp, total = _inputs(node)
    sub: Any = _inputs(exp)[0] if is_call(exp, aten.exp.default) else None
    if not is_call(sub, aten.sub.Tensor):
        return None
    x, largest = _inputs(sub)
    if arg(sub, "alpha") != 1 or not isinstance(x, fx.Node):
        return None
    online = _is_online(largest, 0, x) and _is_online(total, 1, x)
    plain = _is_reduced(largest, aten.amax.default, x) and _is_reduced(
        total, aten.sum.dim_IntList, exp
    )
    return x if (online or plain) and tensor(x).dtype is torch.float32 else None


def _inputs(node: Any) -> tuple[Any, ...]:
    return node.args


def _is_reduced(node: Any, target: Any, x: fx.Node) -> bool:
    """Whether this is x reduced over its last axis, which is kept with the size 1."""
    if not is_call(node, target) or arg(node, "self") is not x or not arg(node, "keepdim"):
        return False
    return is_last(arg(node, "dim"), x) and node.kwargs.get("dtype") in (None, torch.float32)


def _is_online(node: Any, index: int, x: fx.Node) -> bool:
    """Whether this is the maximum (0) or the sum of exponentials (1) of Inductor's online softmax,
    which it has on GPUs.
    """
    if not (is_call(node, operator.getitem) and node.args[1] == index):
        return False
    prepare = node.args[0]
    # Compared by name: the op exists once Inductor is imported.
    return (
        str(prepare.target) == "prims.prepare_softmax_online.default"
        and prepare.args[0] is x
        and is_last(prepare.args[1], x)
    )


def read_elementwise(node: fx.Node) -> tuple[str, fx.Node] | None:
    """A sigmoid or sqrt(softplus) in float32 and what it is of, or None."""
    if tensor(node).dtype is not torch.float32:
        return None
    name, x = "sigmoid", None
    if is_call(node, aten.sigmoid.default):
        x = node.args[0]
    elif is_call(node, aten.mul.Tensor) and constant(node.args[1]) == 1.0:
        x = _x_of_reciprocal(node.args[0])
    elif is_call(node, aten.reciprocal.default):
        x = _x_of_reciprocal(node)
    elif is_call(node, aten.sqrt.default):
        name, x = "sqrtsoftplus", _x_of_softplus(node.args[0])
    return (name, x) if isinstance(x, fx.Node) and tensor(x).dtype is torch.float32 else None


def _x_of_reciprocal(node: Any) -> Any:
    """The x of 1 / (1 + exp(-x)), or None."""
    total: Any = node.args[0] if is_call(node, aten.reciprocal.default) else None
    if not (is_call(total, aten.add.Tensor) and arg(total, "alpha") == 1):
        return None
    exp, one = total.args
    if constant(one) != 1.0 or not is_call(exp, aten.exp.default):
        return None
    minus = exp.args[0]
    return minus.args[0] if is_call(minus, aten.neg.default) else None


def _x_of_softplus(node: Any) -> Any:
    """The x of log(1 + exp(x)), which is x itself above 20, torch's default threshold, or None."""
    if not is_call(node, aten.where.self):
        return None
    above, x, log = node.args
    if not (is_call(above, aten.gt.Scalar) and tuple(above.args) == (x, 20)):
        return None
    if not (is_call(log, aten.log1p.default) and is_call(log.args[0], aten.exp.default)):
        return None
    return x if log.args[0].args[0] is x else None


def bare(node: Any, *shape: Any) -> fx.Node:
    """The innermost node with the same numbers in this shape: below reshapes and widening.

    Raises Mismatch unless the node has this shape.
    """
    require(has_shape(tensor(node), *shape), f"{node} has the shape {tuple(tensor(node).shape)}")
    found: fx.Node = node
    while is_call(node, *RESHAPES) or _widens(node):
        node = node.args[0]
        if has_shape(tensor(node), *shape):
            found = node
    return found


def _widens(node: Any) -> bool:
    return (
        is_call(node, prims.convert_element_type.default)
        and node.args[1] is torch.float32
        and tensor(node.args[0]).dtype in (torch.float32, *NARROW)
    )


def in_float32(node: fx.Node, what: str) -> fx.Node:
    """Return the node. Raises Mismatch unless it computes in float32."""
    dtype = str(tensor(node).dtype).removeprefix("torch.")
    require(dtype == "float32", f"it computes {what} in {dtype}")
    return node


def constant(x: Any) -> float | None:
    """A number, given as such or as a tensor of one element, or None."""
    if is_call(x, aten.full.default) and tensor(x).numel() == 1:
        x = arg(x, "fill_value")
    elif is_call(x, aten.scalar_tensor.default):
        x = arg(x, "s")
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def is_last(dim: Any, x: fx.Node) -> bool:
    """Whether `dim`, a number or a list of one, is the last axis of x."""
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    return dims in ([-1], [tensor(x).dim() - 1])
