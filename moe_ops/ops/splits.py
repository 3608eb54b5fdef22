"""The ways in which the ops of a layer are split over ranks that hold DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_ops.ops.experts import ExpertsCall, weights_of
from moe_ops.registry.rules.sharding import Sharded, Way

ONE_SCALE = (
    "one scale for all rows is made at run time, of rows of several ranks; give whole rows, or a "
    "format with a scale for each row or group"
)


def rows_of(*names: str, apart: Callable[[Any], bool] = lambda call: False) -> Way:
    """Each rank has some of the rows of these arguments, and of the results."""
    return Way(
        said="rows",
        shards=lambda call: dict.fromkeys(names, 0),
        rows=True,
        refuses=lambda call: ONE_SCALE if apart(call) else None,
    )


def by_experts(layer: ExpertsCall) -> dict[str, int]:
    """Each rank has all that belongs to some of the experts."""
    names = [*weights_of(layer)]
    for name in ("global_scale13_E", "global_scale2_E", "x_scale", "h_scale"):
        scale = getattr(layer, name)
        if scale is not None and (name.startswith("global") or scale.numel() > 1):
            names.append(name)
    return dict.fromkeys(names, 0)


def without_map(layer: ExpertsCall) -> str | None:
    if layer.expert_map is not None:
        return None
    return (
        "a rank cannot tell which experts it has; give each rank its expert_map, from the ids of "
        "all experts to its own or -1, or redistribute the weights to Replicate()"
    )


def by_width(layer: ExpertsCall) -> dict[str, int]:
    """Each rank has some of the columns between both products, of every expert."""
    rows, columns = (2, 1) if layer.transposed else (1, 2)
    of_bias = {} if layer.b13_EF is None else {"b13_EF": 1}
    return {"w13_EFD": rows, "w2_EDI": columns, **of_bias}


def no_width(layer: ExpertsCall) -> str | None:
    if layer.w_format or layer.layout:
        return (
            "groups of codes and prepared weights are not split by columns; split experts or "
            "tokens, or let a MoELayer hold a rank's share"
        )
    if layer.gated and not layer.interleaved:
        return (
            "the rows of gate and of up stand one after the other, so a rank would get gates "
            "without their ups; alternate them and give interleaved=True"
        )
    return None


def splits(
    tokens: tuple[str, ...],
    apart: Callable[[Any], bool],
    layer: Callable[[Any], ExpertsCall],
) -> Sharded:
    """A layer's ways: by tokens, by experts, by columns."""
    return Sharded(
        (
            rows_of(*tokens, apart=apart),
            Way(
                said="experts, by each rank's expert_map",
                shards=lambda call: by_experts(layer(call)),
                refuses=lambda call: without_map(layer(call)),
                own=("expert_map",),
            ),
            Way(
                said="interleaved columns of experts",
                shards=lambda call: by_width(layer(call)),
                refuses=lambda call: no_width(layer(call)),
                once=("b2_ED",),
            ),
        )
    )
