"""What stands in a graph in the place of a MoE layer that the passes know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from moe_ops.passes.rewriting.graph import arg, aten, is_call, layer_of, prims

ONE_HOT = (aten.scatter.src, aten.scatter.value, aten.one_hot.default)
PARTS = (aten.select.int, aten.slice.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A choice, where it is made, what becomes of it, and whether only experts can be meant."""

    module: str
    what: str
    of: int | None  # that many are chosen from; None: not known
    is_sure: bool = False


def sightings(graph: fx.Graph) -> Iterator[Sighting]:
    """Every choice of experts in a graph that no pass has touched, and what becomes of it."""
    inputs = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    stacks = [t.shape[0] for t in inputs if isinstance(t, Tensor) and t.dim() > 2]
    weights = {size for size in stacks if isinstance(size, int)}
    for node in graph.find_nodes(op="call_function", target=aten.topk.default):
        what, is_loop, is_one_hot = _choice(node)
        E = _last(arg(node, "self"))
        E = E if isinstance(E, int) else None
        is_sure = E is not None and (is_loop or (is_one_hot and E in weights))
        yield Sighting(module=layer_of(node), what=what, of=E, is_sure=is_sure)


def _choice(topk: fx.Node) -> tuple[str, bool, bool]:
    """A choice in words, and whether a loop over all experts follows, or a one-hot mask."""
    K, E = arg(topk, "k"), _last(arg(topk, "self"))
    # A number of tokens, of which an indexer chooses, may be known at a call alone.
    derived = list(_derived(topk, {size for size in (1, K, E) if isinstance(size, int)}))
    experts = {
        (node.target, node.args[1:])
        for node in derived
        if is_call(node, *PARTS) and _last(node.args[0]) == E and _last(node) != E
    }
    is_loop = len(experts) > 1
    is_one_hot = any(is_call(node, *ONE_HOT) or _is_one_hot(node) for node in derived)
    what = "experts in no form that a pass knows, or in another graph"
    if is_loop:
        what = f"a loop over {len(experts)} experts, each of which runs all tokens"
    elif is_one_hot:
        what = f"a one-hot mask over {E} experts, all of which run all tokens"
    return f"topk of {K} of {E}, then {what}", len(experts) == E, is_one_hot and not is_loop


def _derived(node: fx.Node, sizes: set[int]) -> Iterator[fx.Node]:
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
    """Whether a node compares a tensor with 0, 1, 2, ..."""
    return is_call(node, aten.eq.Tensor) and any(is_call(a, prims.iota.default) for a in node.args)


def _last(node: Any) -> Any:
    """The size of a tensor's last axis; None of what is no tensor, or has no axis."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() else None
