"""Rows that are quantised twice in the same way are quantised once."""

from __future__ import annotations

from typing import Any

from torch import fx

from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import arg, layer_of, ops


def drop_duplicate_quantize(graph: fx.Graph, context: Context) -> int:
    """Let all users of equal `quantize` calls read the first."""
    first: dict[Any, fx.Node] = {}
    dropped = 0
    for node in graph.nodes:
        if node.target is not ops.quantize.default:
            continue
        kept = first.setdefault(
            tuple(arg(node, name) for name in ("x_RD", "format", "scale")), node
        )
        if kept is not node:
            node.replace_all_uses_with(kept)
            context.rewrote(
                "drop_duplicate_quantize", node.name, layer_of(node), f"the same as {kept}"
            )
            graph.erase_node(node)
            dropped += 1
    return dropped
