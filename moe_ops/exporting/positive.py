"""Whether a graph makes numbers that are never negative, proven by the operators that make them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, get_proxy_slot

aten = torch.ops.aten

# What gives numbers from 0 on, whatever it is given.
ALWAYS = frozenset({
    aten._softmax.default, aten.softmax.int, aten.sigmoid.default, aten.exp.default,
    aten.abs.default, aten.relu.default, aten.sqrt.default,
})  # fmt: skip
# What gives such numbers of such numbers: it moves them, or sums them, takes some or rounds them.
OF_SUCH = frozenset({
    aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default,
    aten.squeeze.dim, aten.permute.default, aten.transpose.int, aten.gather.default,
    aten.index.Tensor, aten.sum.dim_IntList, aten.sum.default, aten.clamp_min.default,
    aten.topk.default,
})  # fmt: skip
# What gives such numbers if all that it is given are such, plain numbers too.
OF_ALL = frozenset({
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor,
    aten.add.Scalar, aten.maximum.default, aten.cat.default,
})  # fmt: skip


def is_proven(t: Tensor) -> bool:
    """Whether the graph that is being traced makes this tensor, and of numbers from 0 on alone."""
    mode = get_innermost_proxy_mode()
    if mode is None:
        return False
    slot: Any = get_proxy_slot(t, mode.tracer, None)
    return slot is not None and never_negative(slot.proxy.node)


def never_negative(value: Any) -> bool:
    """Whether a node of a graph, or a number, is from 0 on, infinite or not a number."""
    if isinstance(value, (int, float)):
        return value >= 0 and math.isfinite(value)
    if isinstance(value, (tuple, list)):
        return all(map(never_negative, value))
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return False
    return _gives_such(value.target, value.args, value.kwargs)


def _gives_such(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator gives numbers from 0 on for these arguments."""
    if target in ALWAYS:
        return True
    if target is aten.softplus.default:  # of other factors and thresholds it may be below 0
        return len(args) == 1 and not kwargs
    # Of the outputs of topk the first has values, the second places, which are such numbers too.
    if target is operator.getitem or target in OF_SUCH:
        return never_negative(args[0])
    if target is aten.clamp.default:
        most = args[2] if len(args) > 2 else kwargs.get("max")
        return never_negative(args[0]) and (most is None or never_negative(most))
    if target is aten.masked_fill.Scalar:
        return never_negative(args[0]) and never_negative(args[2])
    if target is aten.where.self:
        return never_negative(args[1]) and never_negative(args[2])
    # A keyword might be a factor of a sum, which may be below 0.
    return target in OF_ALL and not kwargs and all(map(never_negative, args))
