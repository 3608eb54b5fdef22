"""Linear layers in codes that a graph has: which, in which format, and what runs them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall
from moe_ops.passes.merge_quantized_linears import plan_of
from moe_ops.passes.rewriting.graph import is_call, layer_of, ops
from moe_ops.registry.ranges import parse_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearsInCodes:
    """Equal linear layers: modules of the model, rows and columns of a weight, its format, the
    bytes of codes and scales of all of them, and which backend runs how many rows."""

    layers: tuple[str, ...]
    rows: int
    columns: int
    format: str
    bytes: int
    runs: str


def in_codes(graph: fx.Graph) -> list[LinearsInCodes]:
    """Find the layers in codes of a graph, before any are merged."""
    return [
        _one(layer_of(node), QuantizedLinearsCall(*_fakes(node)))
        for node in graph.nodes
        if is_call(node, ops.quantized_linears.default)
    ]


def grouped(found: Iterable[LinearsInCodes]) -> tuple[LinearsInCodes, ...]:
    """Layers that only the numbers in their names tell apart, as one."""
    groups: dict[tuple[Any, ...], list[LinearsInCodes]] = {}
    for one in found:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "", one.layers[0])
        groups.setdefault((name, one.rows, one.columns, one.format, one.runs), []).append(one)
    return tuple(
        LinearsInCodes(
            layers=tuple(layer for one in same for layer in one.layers),
            rows=rows, columns=columns, format=format, runs=runs,
            bytes=sum(one.bytes for one in same),
        )
        for (_, rows, columns, format, runs), same in groups.items()
    )  # fmt: skip


def _one(layer: str, call: QuantizedLinearsCall) -> LinearsInCodes:
    held = [t for given in (call.weights, call.scales, call.zeros) for t in given if t is not None]
    return LinearsInCodes(
        layers=(layer,), rows=call.weights[0].shape[0], columns=call.x_TK.shape[1],
        format=call.w_format, bytes=sum(t.numel() * t.itemsize for t in held), runs=_runs(call),
    )  # fmt: skip


def _fakes(node: fx.Node) -> tuple[Any, ...]:
    found: tuple[Any, ...] = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    return found


def _runs(call: QuantizedLinearsCall) -> str:
    """The plan of a call in words."""
    ranges = parse_plan(plan_of(call))
    return ", then ".join(
        name if upto is None else f"{name} to {upto} rows" for upto, name in ranges
    )
