"""What a layer has a place for, and which places a load has left empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moe_ops.layer import MoELayer
from moe_ops.layer.tensors import INPUT_SCALES, NAMES
from moe_ops.weights.record import WEIGHTS, LoadRecord
from moe_ops.weights.shards import one_input_scale

EXPERTS = tuple(name for name in NAMES if name in WEIGHTS)


def shards_of(layer: MoELayer) -> dict[str, tuple[str, ...]]:
    """What the first and the second weight consist of. Without a gate, up is the first of all."""
    return {"w13": ("w1", "w3") if layer.activation.gated else ("w1",), "w2": ("w2",)}


def has_place(layer: MoELayer, parameter: str, part: str) -> bool:
    """Whether the layer holds it, or is to be told: what it lacks may still have to be checked."""
    if part in ("g_idx", "shape", "zero"):
        return layer.quant is not None
    if parameter == "w2_bias":
        return layer.w13_bias is not None
    return getattr(layer, parameter) is not None


def missing_of(
    prefix: str, layer: MoELayer, record: LoadRecord, others: Iterable[str]
) -> Iterator[str]:
    """Names of what this rank holds of experts and no entry filled, and of all that it holds
    besides.
    """
    for parameter in EXPERTS:
        if getattr(layer, parameter) is None:
            continue
        _, second = WEIGHTS[parameter]
        every = parameter in INPUT_SCALES and one_input_scale(layer)
        for expert in range(layer.num_experts + (0 if every else layer.placement.shared)):
            if not every and not record.slots_of(layer, expert):
                continue
            for shard in shards_of(layer)["w2" if second else "w13"]:
                if (parameter, expert, shard) not in record.seen:
                    yield f"{prefix}.{parameter}[{expert}].{shard}"
    yield from (f"{prefix}.{parameter}" for parameter in others)
