"""Numbers of a layer that stand beside weights: those that serve several tensors of a checkpoint,
each of which has its own, and those that have to come with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.weights.advice import advising
from moe_ops.weights.record import LoadRecord, Writes
from moe_ops.weights.shards import one_input_scale

FACTORS = ".pre_quant_scale"  # what names of factors of an input's columns end in


def agree(parameter: str, name: str, expert: int, value: Tensor, record: LoadRecord | None) -> None:
    """Raise ValueError unless the number is the one that was there before, if one was."""
    if record is None:
        raise ValueError(
            "one number serves w1 and w3, which must agree; pass this load's LoadRecord"
        )
    key = (parameter, expert)
    before, other = record.shared.setdefault(key, (value.clone(), name))
    if not torch.equal(before.float(), value.float()):
        raise advising(
            ValueError,
            f"expert {expert} has {float(value.flatten()[0])} here, but "
            f"{float(before.flatten()[0])} in {other}, and one number must serve both",
            "give the layer a format with a scale per row, or quantise them again",
        )


def load_input(
    layer: MoELayer,
    parameter: str,
    t_E: Sequence[Tensor],
    experts: Sequence[int],
    shard: str,
    record: LoadRecord | None,
) -> Writes:
    """The static scale of an input: the largest of w1 and w3, of each expert or of all.

    A larger scale loses some resolution, where a smaller one would cut values off.
    """
    target = getattr(layer, parameter)
    if target is None:
        raise advising(
            ValueError,
            f"the layer holds no {parameter}",
            "make it with QuantConfig(static_inputs=True)",
        )
    if record is None:
        raise ValueError("one scale serves w1 and w3 and all experts; pass this load's LoadRecord")
    found: dict[int, Tensor] = {}
    for expert, t in zip(experts, t_E, strict=True):
        both = t.numel() == 2 and shard == "w13"
        if t.numel() != 1 and not both:
            raise ValueError(
                f"expected the shape [1], found {list(t.shape)}; quantise the inputs of an expert "
                "with one scale"
            )
        value = t.reshape(-1).float()
        if not bool((value.isfinite() & (value > 0)).all()):
            raise ValueError(f"expert {expert} has {value.tolist()}, but a scale is above 0")
        found[expert] = value.amax().to(target.device)
    for expert, value in found.items():
        for key in ((parameter, expert), (parameter, None)):
            record.inputs[key] = torch.maximum(record.inputs.get(key, value), value)
    return _input_writes(layer, parameter, experts, record)


def _input_writes(
    layer: MoELayer, parameter: str, experts: Sequence[int], record: LoadRecord
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales of inputs as they are known when they are written."""
    target = getattr(layer, parameter).detach()
    if one_input_scale(layer):
        yield target, record.inputs[parameter, None].reshape(target.shape)
        return
    for expert in experts:
        for slot in record.slots_of(layer, expert):
            yield target[slot], record.inputs[parameter, expert]


def check_input_factors(name: str, read: Callable[[], Tensor]) -> None:
    """Raise ValueError, naming the entry, for factors of the columns of an input other than 1.

    AWQ of ModelOpt scales columns of weights, and inputs by the inverse (`pre_quant_scale`).
    """
    if name.endswith(FACTORS) and not bool((read() == 1).all()):
        raise ValueError(
            f"{name} has factors of the columns of an input other than 1, by which no op "
            "multiplies it; quantise the weights without AWQ, or dequantise the checkpoint"
        )


def check_complete(
    layer: MoELayer, record: LoadRecord, shards: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise ValueError, naming the entry, for codes of an expert here whose scales, or zero points,
    did not come with them: what the layer has in their place belongs to other codes.

    shards: what the first and the second weight consist of.
    """
    for weight, parts in shards.items():
        for what, said in (("scale", "scales"), ("zero", "zero points"), ("global_scale", "scale")):
            if getattr(layer, f"{weight}_{what}") is None:
                continue
            for expert in range(layer.num_experts + layer.placement.shared):
                for shard in parts if record.slots_of(layer, expert) else ():
                    name = record.seen.get((f"{weight}_weight", expert, shard))
                    if name is not None and (f"{weight}_{what}", expert, shard) not in record.seen:
                        raise ValueError(
                            f"{name}: no entry has the {said} of its codes ({weight}_{what} of "
                            f"expert {expert}, {shard}); complete the download, and load all files "
                            "in one call"
                        )
