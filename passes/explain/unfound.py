"""What a model without a MoE region has in the place of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, fx

from moe_ops.passes.explain.explanation import Seen
from moe_ops.passes.explain.trace import Break
from moe_ops.passes.graph import arg, aten, is_call, layer_of, prims

BY_VALUE = ("Dynamic shape operator", "Data dependent", "Data-dependent")  # reasons of breaks
ONE_HOT = (aten.scatter.src, aten.scatter.value, aten.one_hot.default)
PARTS = (aten.select.int, aten.slice.Tensor)

Sighting = tuple[str, str]  # what was seen, and where: the module, or a line of code


def sightings(graph: fx.Graph) -> Iterator[Sighting]:
    """Every choice of experts in a graph that no pass has touched, and what becomes of it."""
    for node in graph.find_nodes(op="call_function", target=aten.topk.default):
        yield _choice(node), layer_of(node)


def seen(found: Iterable[Sighting], breaks: Iterable[Break]) -> tuple[Seen, ...]:
    """Equal sightings as one, and where a graph ended at a size that only values tell."""
    where: dict[str, list[str]] = defaultdict(list)
    loops = [
        ("sizes that depend on values, as in a loop over the experts that were chosen", b.where)
        for b in breaks
        if b.reason.startswith(BY_VALUE)
    ]
    for text, place in dict.fromkeys((*found, *loops)):
        where[text].append(place)
    return tuple(Seen(what=text, where=tuple(places)) for text, places in where.items())


def _choice(topk: fx.Node) -> str:
    K, E = arg(topk, "k"), _last(arg(topk, "self"))
    derived = list(_derived(topk, {1, K, E}))
    experts = {
        (node.target, node.args[1:])
        for node in derived
        if is_call(node, *PARTS) and _last(node.args[0]) == E and _last(node) != E
    }
    what = "experts in no form that a pass knows, or in another graph"
    if len(experts) > 1:
        what = f"a loop over {len(experts)} experts, each of which runs all tokens"
    elif any(is_call(node, *ONE_HOT) or _is_one_hot(node) for node in derived):
        what = f"a one-hot mask over {E} experts, all of which run all tokens"
    return f"topk of {K} of {E}, then {what}"


def _derived(node: fx.Node, sizes: set[Any]) -> Iterator[fx.Node]:
    """What is computed from a choice before it meets tokens: its last axis is one of these."""
    known, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            last = _last(user)
            if user in known or not (last is None or (isinstance(last, int) and last in sizes)):
                continue
            known.add(user)
            waiting.append(user)
            yield user


def _is_one_hot(node: fx.Node) -> bool:
    """Whether it compares with 0, 1, 2, ..."""
    return is_call(node, aten.eq.Tensor) and any(is_call(a, prims.iota.default) for a in node.args)


def _last(node: Any) -> Any:
    """The size of a tensor's last axis; None of what is no tensor, or has no axis."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() else None
