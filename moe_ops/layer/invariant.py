"""Layers of several ranks in batch invariant calls: a token's result has the bits that one process
gives it, which holds all experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from moe_ops.checks.shapes import check_size
from moe_ops.layer.operands import operands_of
from moe_ops.layer.parts import ALONE, PARTIAL, Combination
from moe_ops.layer.run import Routed, run_summed
from moe_ops.ops.by_choice import asked


def why_not(layer: Any) -> str | None:
    """Why the result of a `MoELayer` depends on the number of its ranks, and what to do; or None.

    It is that of the arguments it was made with, whatever the call.
    """
    parallel, exchanges = layer.parallel, layer.exchange is not None
    if parallel.size == 1:
        return None
    if not parallel.uses_ep:
        return (
            f"each of {parallel.size} ranks multiplies a shard of every expert, and their sum over "
            "the intermediate width depends on how many there are; give each rank whole experts: "
            "expert_parallel=True of ParallelConfig.of"
        )
    if not exchanges and layer.reduce_results is None:
        return (
            "forward returns this rank's part of a sum that the caller makes; give reduce_results, "
            "the group_name of the group of these ranks"
        )
    if not exchanges and not isinstance(layer.reduce_results, str):
        return (
            "reduce_results is a function, which adds parts in an order of its own; give the "
            "group_name of the group of these ranks"
        )
    if layer.shared_experts is not None and layer.shared_reduction == PARTIAL:
        return (
            "shared experts return a part of a sum over the ranks, whose order depends on how many "
            "there are; give shared experts that are whole on every rank, and say so: "
            "shared_reduction='replicated'"
        )
    return None


def require(layer: Any) -> None:
    """Raise NotImplementedError, with the reason, for a call that is to be batch invariant of a
    layer that cannot be."""
    why = why_not(layer) if asked() else None
    if why is not None:
        raise NotImplementedError(f"this MoELayer is not batch invariant: {why}")


def in_one_order(
    layer: Any, how: Combination, routed: Routed, run: Callable[[], Tensor]
) -> tuple[Combination, Callable[[], Tensor]]:
    """What makes the routed part of a layer whose tokens are given here, and the result: `run` and
    what it is given, unless ranks have to add their parts in the order of one process."""
    if layer.parallel.size == 1 or not asked():
        return how, run
    assert isinstance(how.reduction, str), "as `require` says"
    check_size("x", routed.x_TD, 1, layer.sizes.hidden_size, "the layer's hidden_size")
    summed = partial(
        run_summed, operands_of(layer), routed, layer.expert_map, how.reduction,
        layer.placement.shared,
    )  # fmt: skip
    return replace(how, reduction=ALONE), summed
