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
from moe_ops.layer.parts import ALONE, PARTIAL, Combination, result_of
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
    why = why_not(layer) if layer.batch_invariant or asked() else None
    if why is not None:
        raise NotImplementedError(f"this MoELayer is not batch invariant: {why}")


def result_here(layer: Any, how: Combination, x_TD: Tensor, routed: Routed) -> tuple[Tensor, ...]:
    """The result of a layer whose tokens are given here: ranks add their parts, or, where calls are
    to be batch invariant, rows of choices."""
    run: Callable[[], Tensor] = partial(layer.run_experts, *routed)
    if layer.parallel.size > 1 and (layer.batch_invariant or asked()):
        assert isinstance(how.reduction, str), "as `require` says"
        check_size("x", routed.x_TD, 1, layer.sizes.hidden_size, "the layer's hidden_size")
        group, fused = how.reduction, layer.placement.shared
        run = partial(run_summed, operands_of(layer), routed, layer.expert_map, group, fused)
        how = replace(how, reduction=ALONE)
    return result_of(how, x_TD, run)
