"""Reading the choice of groups: experts outside of the best groups are masked before the top-k.

mask   = 1 at the indices of topk(worth), 0 elsewhere, spread over the experts of each group
worth  = the largest score of a group, or the sum of its two largest
choice = the scores where the mask is 1, elsewhere 0 or -inf
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moe_ops.passes.rewriting.graph import (
    RESHAPES,
    arg,
    aten,
    call,
    has_shape,
    is_call,
    output,
    peel,
    prims,
    require,
    same,
    tensor,
)
from moe_ops.passes.routing.scores import bare, constant, in_float32, is_last

# A masked expert weighs its score where weights are gathered; `read` in router.py has the other.
FILLS = {float("-inf"): "-inf", 0.0: "zero"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """How groups limit the choice; one group limits nothing."""

    count: int = 1
    best: int = 1
    reduce: str = ""
    fill: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The groups as arguments of `route`; empty if they limit nothing."""
        if self.best == self.count:  # every group is among the best
            return {}
        return {
            "n_group": self.count,
            "topk_group": self.best,
            "group_reduce": self.reduce,
            "group_fill": self.fill,
        }


def read_groups(choice: fx.Node, T: Any, E: int) -> tuple[fx.Node, Groups]:
    """The [T, E] scores below the mask, and the groups, if there is a mask."""
    choice = bare(choice, T, E)
    if not is_call(choice, aten.where.self):
        return choice, Groups()
    mask, a, b = choice.args
    ones, spread, inverted = _mask(mask)
    scores, fill = (b, constant(a)) if inverted else (a, constant(b))
    require(fill in FILLS, f"it masks with {b if fill is None else fill}, not with 0 or -inf")
    plain = bare(scores, T, E)
    require(has_shape(tensor(mask), T, E), f"its mask has the shape {tuple(tensor(mask).shape)}")

    G = tensor(ones).shape[-1]
    require(has_shape(tensor(ones), T, G), "its mask of groups has not one row for each token")
    require(isinstance(G, int) and E % G == 0, f"{E} experts are in {G} groups")
    if spread is not None:
        require(has_shape(tensor(spread), T, G, E // G), "its mask is not spread over groups")
        require(has_shape(tensor(spread.args[0]), T, G, 1), "its mask is not one for each group")
    else:
        require(G == E, "its mask is not spread over groups")
    best = _marked(ones, T, G)
    topk = output(best, 1, aten.topk.default, what="the source of the best groups")
    require(is_last(arg(topk, "dim"), arg(topk, "self")), "it chooses groups along another axis")
    require(arg(topk, "largest"), "it chooses the smallest groups")
    reduce = _worth(arg(topk, "self"), plain, T, G, E // G)
    count = tensor(best).shape[1]
    return plain, Groups(count=G, best=count, reduce=reduce, fill=FILLS[fill])  # type: ignore[index]


def _mask(node: Any) -> tuple[fx.Node, fx.Node | None, bool]:
    """The zeros and ones of groups that a mask [T, E] is made of, the node that spreads them over
    experts, if any, and whether the mask is inverted."""
    spread, inverted = None, False
    while True:
        node = peel(node)
        if is_call(node, aten.bitwise_not.default, aten.logical_not.default):
            require(tensor(node).dtype is torch.bool, "its mask is no bool")
            inverted = not inverted
        elif is_call(node, aten.expand.default):
            require(spread is None, "its mask is spread twice")
            spread = node
        elif is_call(node, aten.ne.Scalar):
            require(node.args[1] == 0, "its mask is not compared with 0")
        elif not is_call(node, prims.convert_element_type.default):
            break
        node = node.args[0]
    return node, spread, inverted


def _marked(ones: fx.Node, T: Any, G: int) -> Any:
    """The indices [T, best] at which there are ones instead of zeros."""
    if is_call(ones, aten.scatter.value):
        zeros, best, one = (arg(ones, name) for name in ("self", "index", "value"))
        empty = is_call(zeros, aten.full.default) and arg(zeros, "fill_value") == 0
        require(empty, "its mask is written into other than zeros")
        require(is_last(arg(ones, "dim"), ones), "its mask is written along another axis")
        require(one == 1, f"its mask is written with {one}, not with 1")
        require(same(tensor(best).shape[0], T), "its mask is not written for each token")
        return best
    # Where there is one best group, Inductor compares it with each group's number instead.
    where = call(ones, aten.where.self, what="its mask of groups")
    one, zero = constant(arg(where, "self")), constant(arg(where, "other"))
    require((one, zero) == (1.0, 0.0), "its mask is not of ones and zeros")
    equal = call(arg(where, "condition"), aten.eq.Tensor, what="its mask of groups")
    best, numbers = (_unexpanded(arg(equal, name)) for name in ("self", "other"))
    if is_call(best, prims.iota.default):
        best, numbers = numbers, best
    iota = call(numbers, prims.iota.default, what="the groups' numbers")
    counted = (iota.args[0], iota.kwargs.get("start"), iota.kwargs.get("step"))
    require(counted == (G, 0, 1), "the groups' numbers do not count from 0 by 1")
    require(has_shape(tensor(best), T, 1), "its mask is not written for each token")
    return best


def _unexpanded(node: Any) -> Any:
    while is_call(node, aten.expand.default, *RESHAPES):
        node = node.args[0]
    return node


def _worth(worth: Any, plain: fx.Node, T: Any, G: int, size: int) -> str:
    """How a group's worth [T, G] is made from the scores [T, G, size] of its experts."""
    require(has_shape(tensor(worth), T, G), "it does not rate each group")
    node = peel(worth)
    if is_call(node, aten.amax.default):
        name, groups = "max", arg(node, "self")
        require(is_last(arg(node, "dim"), groups), "it rates groups along another axis")
    elif is_call(node, operator.getitem):
        largest = output(node, 0, aten.max.dim, what="the worth of groups")
        name, groups = "max", arg(largest, "self")
        require(is_last(arg(largest, "dim"), groups), "it rates groups along another axis")
    else:
        name, groups = "top2sum", _summed_twos(node)
    require(has_shape(tensor(groups), T, G, size), "it rates other groups than those it masks")
    scores = groups
    while is_call(scores, *RESHAPES) and not has_shape(tensor(scores), T, G * size):
        scores = scores.args[0]
    same_scores = bare(scores, T, G * size) is plain
    require(same_scores, "it rates groups by other scores than those it chooses by")
    return name


def _summed_twos(node: Any) -> Any:
    """The x of topk(x, 2).values.sum(-1)."""
    total = call(node, aten.sum.dim_IntList, what="the worth of groups")
    values = arg(total, "self")
    require(is_last(arg(total, "dim"), values), "it rates groups along another axis")
    in_float32(total, "the worth of groups")
    two = output(values, 0, aten.topk.default, what="what rates groups")
    groups = arg(two, "self")
    require(is_last(arg(two, "dim"), groups), "it rates groups along another axis")
    require(bool(arg(two, "largest")), "it rates groups by their smallest scores")
    require(arg(two, "k") == 2, f"it rates groups by their {arg(two, 'k')} largest scores")
    return groups
