"""Reading a router: from the ids and weights of a post-grad graph to the arguments of `route`.

A strict recursive descent. Every node on the way is one that the grammar names, with its axes,
shapes, dtypes and constants as the grammar wants them, or `Mismatch` says what it is instead. What
the grammar cannot read of a [T, E] tensor of scores stays outside, as the logits of the call.

    weights = [scaled] [divided by their sum] [softmax over K] [score function] (values | gather)
    ids     = indices of topk(choice)
    choice  = plain, or plain in the best groups and 0 or -inf outside (groups.py)
    plain   = the scores, or the logits, [+ bias]
    scores  = softmax | sigmoid | sqrt(softplus), of the logits (scores.py)

All of it is computed in float32, as `route` does: a node that rounds to less is no part of it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from moe_ops.ops.route import beyond_groups
from moe_ops.passes.rewriting.graph import (
    RESHAPES,
    Mismatch,
    arg,
    aten,
    call,
    has_shape,
    is_call,
    output,
    peel,
    prims,
    require,
    tensor,
)
from moe_ops.passes.routing.groups import Groups, read_groups
from moe_ops.passes.routing.scores import (
    NARROW,
    bare,
    constant,
    in_float32,
    is_last,
    read_elementwise,
    read_score,
    read_softmax,
)

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A router: what it reads, the arguments of `route` that say what it does, and its results."""

    logits: fx.Node  # [T, E]
    bias: fx.Node | None  # [E] or [1, E]
    expert_scale: fx.Node | None  # [E]
    arguments: dict[str, Any]  # those of `route` that are neither tensors nor defaults
    topk: fx.Node
    ids: fx.Node  # [T, K], the indices of topk
    exact: fx.Node  # [T, K], the weights before they are rounded to their dtype

    @property
    def leaves(self) -> dict[str, fx.Node]:
        """The tensors that it reads, by their names in `route`."""
        named = {
            "logits_TE": self.logits,
            "bias_E": self.bias,
            "per_expert_scale_E": self.expert_scale,
        }
        return {name: node for name, node in named.items() if node is not None}


def read(ids_TK: Any, weights_TK: Any) -> Routing:
    """The router that these ids and weights come from. Raises Mismatch if `route` is not it."""
    ids = read_ids(ids_TK)
    T, K = tensor(ids).shape
    topk: Any = ids.args[0]
    choice, E = _choice(topk, K)
    weights = _weights(weights_TK, ids, T, K)
    plain, groups = read_groups(choice, T, E)
    groups = _filled(groups, weights, K, E)
    source = bare(_source(weights, topk, plain), T, E)

    score, logits = (weights.score, source) if weights.score else read_score(source)
    chosen_on, bias = _chosen_on(plain, source, logits, T, E)
    arguments = {"top_k": K, "score": score} | groups.arguments | weights.arguments
    if score != "logit" and chosen_on is logits:
        arguments["select_on"] = "logit"
    if weights.arguments.get("renormalize"):
        # `route` takes a sum below zero for zero.
        positive = score != "logit" or "softmax_selected" in weights.arguments
        positive = positive and weights.arguments.get("eps", 0.0) >= 0.0
        require(positive, "it divides the weights by a sum that may be negative")
    return Routing(
        logits=logits, bias=bias, expert_scale=weights.expert_scale, arguments=arguments,
        topk=topk, ids=ids, exact=weights.exact,
    )  # fmt: skip


def unscaled(weights: fx.Node) -> fx.Node:
    """The weights below products with scalars that are no numbers, or these weights.

    So torch.compile(dynamic=True) has a float that is an attribute of a module. The products stay.
    """
    found = node = weights
    while True:
        if is_call(node, *RESHAPES, prims.convert_element_type.default):
            node = node.args[0]  # type: ignore[assignment]
            continue
        if not is_call(node, aten.mul.Tensor):
            return found
        x, by = arg(node, "self"), arg(node, "other")
        if constant(x) is not None or (isinstance(x, fx.Node) and tensor(x).dim() == 0):
            x, by = by, x
        if constant(by) is None:
            if not isinstance(by, fx.Node) or tensor(by).dim() > 0:
                return found
            found = x
        node = x


def read_ids(node: Any) -> fx.Node:
    """The indices of a topk below reshapes and conversions between integers."""
    shape = tensor(node).shape
    while is_call(node, *RESHAPES) or (
        is_call(node, prims.convert_element_type.default) and node.args[1] in INTEGERS
    ):
        node = node.args[0]
    output(node, 1, aten.topk.default, what="the source of the ids")
    require(len(shape) == 2, f"the ids have {len(shape)} axes, not two")
    require(has_shape(tensor(node), *shape), "the ids are arranged in another way")
    return node


def _choice(topk: fx.Node, K: int) -> tuple[fx.Node, int]:
    """What topk chooses from, and the number of experts."""
    choice = arg(topk, "self")
    require(tensor(choice).dim() == 2, "it chooses from a tensor without two axes")
    require(is_last(arg(topk, "dim"), choice), "it chooses along another axis")
    require(bool(arg(topk, "largest")), "it chooses the smallest")
    E = tensor(choice).shape[1]
    require(isinstance(E, int) and isinstance(K, int), "the number of experts is not known")
    return choice, E


def _chosen_on(
    plain: fx.Node, source: fx.Node, logits: fx.Node, T: Any, E: int
) -> tuple[fx.Node, fx.Node | None]:
    """The node, scores or logits, by which experts are chosen, and the bias that is added."""
    for scores in (source, logits):
        if plain is scores:
            return scores, None
    if is_call(plain, aten.add.Tensor) and arg(plain, "alpha") == 1:
        for x, bias in (plain.args, plain.args[::-1]):
            if isinstance(x, fx.Node) and isinstance(bias, fx.Node) and _is_bias(bias, x, T, E):
                x = bare(x, T, E)
                if x is source or x is logits:
                    in_float32(plain, "the biased scores")
                    return x, bare(bias, *tensor(bias).shape)
    raise Mismatch("it chooses by something else than the scores that become weights")


def _is_bias(bias: fx.Node, x: fx.Node, T: Any, E: int) -> bool:
    per_expert = has_shape(tensor(bias), E) or has_shape(tensor(bias), 1, E)
    return per_expert and has_shape(tensor(x), T, E)


@dataclass(slots=True, kw_only=True)
class _Weights:
    """What is read of the weights on the way down to the scores that they are taken from."""

    exact: fx.Node
    arguments: dict[str, Any] = field(default_factory=dict)
    expert_scale: fx.Node | None = None
    score: str = ""  # a score function applied after the scores are taken
    base: fx.Node


def _weights(weights: Any, ids: fx.Node, T: Any, K: int) -> _Weights:
    """Read the weights down to a gather, or the values of the topk."""
    node = bare(weights, T, K)
    rounded = is_call(node, prims.convert_element_type.default) and node.args[1] in NARROW
    if rounded and tensor(node).dtype is tensor(weights).dtype:
        node = bare(node.args[0], T, K)
    found = _Weights(exact=node, base=node)
    _read_scales(found, ids, T, K)
    _read_renormalisation(found, T, K)
    x = read_softmax(found.base)
    if x is not None:
        found.arguments["softmax_selected"] = True
        found.base = bare(x, T, K)
    elementwise = read_elementwise(found.base)
    if elementwise is not None:
        found.score, x = elementwise
        found.base = bare(x, T, K)
    return found


def _read_scales(found: _Weights, ids: fx.Node, T: Any, K: int) -> None:
    """Read products with numbers, and with a number for each expert."""
    scale = 1.0
    while is_call(found.base, aten.mul.Tensor, aten.div.Tensor):
        node = found.base
        is_product = node.target is aten.mul.Tensor
        x, by = node.args
        if is_product and (constant(x) is not None or _per_expert(x, ids) is not None):
            x, by = by, x
        number, per_expert = constant(by), _per_expert(by, ids) if is_product else None
        if number is not None:
            scale = scale * number if is_product else scale / number
        elif per_expert is not None:
            require(found.expert_scale is None, "it scales by two numbers for each expert")
            found.expert_scale = per_expert
        else:
            break
        in_float32(node, "the scaled weights")
        found.base = bare(x, T, K)
    require(math.isfinite(scale), f"it scales the weights by {scale}")
    if scale != 1.0:
        found.arguments["scale"] = scale


def _per_expert(node: Any, ids: fx.Node) -> fx.Node | None:
    """The vector [E] of which this is the elements at the ids, or None."""
    if not isinstance(node, fx.Node):
        return None
    node = bare(node, *tensor(node).shape)
    if not is_call(node, aten.index.Tensor):
        return None
    vector, indices = arg(node, "self"), arg(node, "indices")
    if tensor(vector).dim() != 1 or len(indices) != 1:
        return None
    try:
        of_ids = read_ids(indices[0]) is ids
    except Mismatch:
        return None
    return bare(vector, *tensor(vector).shape) if of_ids else None


def _read_renormalisation(found: _Weights, T: Any, K: int) -> None:
    """Read x / max(sum(x) + eps, min_sum)."""
    node = found.base
    if not is_call(node, aten.div.Tensor) or read_softmax(node) is not None:
        return
    x, total = arg(node, "self"), arg(node, "other")
    require(isinstance(total, fx.Node), f"it divides the weights by {total}")
    require(has_shape(tensor(total), T, 1), "it divides the weights by others than their sum")
    arguments: dict[str, Any] = {"renormalize": True}
    total = peel(total)
    if is_call(total, aten.clamp_min.default):
        in_float32(total, "the weights' sum")
        arguments["min_sum"] = constant(arg(total, "min"))
        total = peel(arg(total, "self"))
    if is_call(total, aten.add.Tensor) and arg(total, "alpha") == 1:
        in_float32(total, "the weights' sum")
        a, b = arg(total, "self"), arg(total, "other")
        a, b = (a, b) if constant(a) is None else (b, a)
        arguments["eps"] = constant(b)
        total = peel(a)
    require(None not in arguments.values(), "it adds a tensor to the weights' sum, or clamps it")
    total = call(total, aten.sum.dim_IntList, what="what divides the weights")
    summand = arg(total, "self")
    require(is_last(arg(total, "dim"), summand), "it sums the weights along another axis")
    in_float32(total, "the weights' sum")
    in_float32(node, "the weights")
    found.base = bare(x, T, K)
    require(bare(summand, T, K) is found.base, "it divides the weights by the sum of others")
    found.arguments |= arguments


def _filled(groups: Groups, weights: _Weights, K: int, E: int) -> Groups:
    """The groups, with what `route` calls the fill of their masked experts."""
    if groups.best == groups.count:
        return groups
    if groups.fill == "zero" and not is_call(weights.base, aten.gather.default):
        # The weights are the masked scores, of which masked experts have 0.
        require(not weights.score, "masked experts may be chosen, and weigh what it makes of 0")
        return replace(groups, fill="zero_weight")
    beyond = beyond_groups(E, K, groups.count, groups.best)
    require(beyond is None, f"{beyond}, and ties decide on the others")
    return groups


def _source(weights: _Weights, topk: fx.Node, plain: fx.Node) -> fx.Node:
    """The [T, E] scores that the weights are taken from."""
    base = weights.base
    if is_call(base, aten.gather.default):
        require(is_last(arg(base, "dim"), base), "it takes the weights along another axis")
        at_topk = read_ids(arg(base, "index")).args[0] is topk
        require(at_topk, "the weights are taken at the ids of another topk")
        return arg(base, "self")
    if is_call(base, prims.convert_element_type.default):
        raise Mismatch(f"it rounds the weights to {base.args[1]} before they are done")
    require(
        is_call(base, operator.getitem) and bool(base.args[1] == 0),
        f"the weights are {base.target}, not the scores of the chosen experts",
    )
    require(base.args[0] is topk, "the weights are the values of another topk")
    return plain
