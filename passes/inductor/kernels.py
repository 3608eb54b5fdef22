"""Our kernels begin to compile while Inductor compiles the rest of their graph.

What the graph knows of an op's tensors tells which kernels it launches. The first call of the op
waits until they are there, and compiles them itself if its tensors are others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from moe_ops.backends.triton_ahead import of_plan
from moe_ops.backends.triton_device import unavailable
from moe_ops.passes.pick_backend import arguments_of, is_functional
from moe_ops.registry.spec import DECODE_OPS, NAMESPACE, OPS, Op


class _Unknown(Exception):
    """A size that the compiler does not know decides which kernels are launched."""


def begin(graph: fx.Graph) -> None:
    """Begin to compile the Triton kernels of all planned ops on GPUs whose sizes are known."""
    if not torch.cuda.is_available() or unavailable() is not None:
        return
    for node in graph.nodes:
        op = _planned(node)
        if op is None:
            continue
        args, named = arguments_of(op, node)
        plan = named["plan"]
        given = {name: value for name, value in named.items() if name != "plan"}
        any_rows = ":" in plan and op.name in OPS  # a step is of one number of rows
        try:
            call = op.call(*_known(args, any_rows), **_known(given, any_rows))
        except _Unknown:
            continue
        device = op.arguments.first(call).device
        if device.type == "cuda":
            of_plan(op, plan).begin(call, device)


def _planned(node: fx.Node) -> Op | None:
    """The op that a node calls by a plan, or None."""
    target: Any = node.args[0] if is_functional(node) else node.target
    if node.op != "call_function" or getattr(target, "namespace", "") != NAMESPACE:
        return None
    name = target._schema.name.partition("::")[2]
    op = OPS.get(name) or DECODE_OPS.get(name)
    return op if op is not None and target is op.planned else None


def _known(value: Any, any_rows: bool) -> Any:
    """A value of a graph with shadows for tensors. Raises _Unknown for unknown sizes."""
    if isinstance(value, dict):
        return {name: _known(each, any_rows) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(each, any_rows) for each in value]
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        raise _Unknown
    if not isinstance(value, Tensor):
        return value
    from moe_ops.kernels.triton.shadows import shadow_of_traced

    shadow = shadow_of_traced(value, any_rows)
    if shadow is None:
        raise _Unknown
    return shadow
