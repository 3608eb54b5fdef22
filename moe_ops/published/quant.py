"""How all experts of a checkpoint are quantised: the one configuration that a model has."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_ops.published.formats import format_of_inputs, read_part
from moe_ops.published.names import EXPERTS
from moe_ops.published.survey import Experts, Found, Survey
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.weights.codings import Codings
from moe_ops.weights.configuration import naming
from moe_ops.weights.global_scales import rescaled


def quant_of(found: Survey, codings: Codings, inputs: str | None) -> QuantConfig | None:
    """The one format of all experts in codes, and that of their inputs; None without codes.

    Raises ValueError, naming entries, for several, and for inputs of None whose codes have a zero
    point.
    """
    formats: dict[str, Found] = {}
    for experts in found.experts.values():
        formats.setdefault(experts.format(codings), experts.first)
    if len(formats) > 1:
        said = ", ".join(f"{f.name} of {f.file} is in {name}" for name, f in formats.items())
        raise ValueError(
            f"{said}: experts of one model are in one format; load layers (MoELayer) with "
            "load_checkpoint, or quantise them alike"
        )
    for name in formats:
        static = format_of_inputs(name) if inputs is None else ""
        scaled = any(experts.input_scales for experts in found.experts.values())
        if inputs is None and scaled and codings.inputs:
            made = QuantConfig(weights=name, inputs=codings.inputs, static_inputs=True)
        elif static and scaled:
            _check_symmetric_inputs(found)
            made = QuantConfig.with_static_inputs(name, static)
        else:
            made = QuantConfig(weights=name, inputs=inputs or "")
        two = Format.of(name).has_global_scale and any(map(_are_two, found.experts.values()))
        return replace(made, two_global_scales=two)
    return None


def _are_two(experts: Experts) -> bool:
    """Whether gate and up of some expert have global scales of their own, for which the scales of
    blocks cannot make up."""
    for (part, shard, expert), found in experts.parts.items():
        if part != "global_scale" or shard not in ("w1", "w13"):
            continue
        mine = _scale(found)
        if shard == "w13":
            if mine.dim() == 2 and mine.shape[1] == 2 and not torch.equal(*mine.unbind(1)):
                return True
            continue
        other = experts.parts.get((part, "w3", expert))
        if other is None:
            continue
        theirs = _scale(other)
        if torch.equal(mine.flatten(), theirs.flatten()):
            continue
        if not torch.equal(*(torch.frexp(t.float().flatten()).mantissa for t in (mine, theirs))):
            return True  # no power of two between them
        scales = (experts.parts.get(("scale", shard, expert)) for shard in ("w1", "w3"))
        of_mine, of_theirs = (None if s is None else s.read() for s in scales)
        if of_mine is None or of_theirs is None:
            continue  # which is refused when they are loaded
        if rescaled(of_theirs, mine, theirs) is None and rescaled(of_mine, theirs, mine) is None:
            return True
    return False


def _scale(found: Found) -> Tensor:
    """A scale as a factor that codes are multiplied by."""
    with naming(f"{found.name} of {found.file}"):
        return read_part(found.read, found.reciprocal)


def _check_symmetric_inputs(found: Survey) -> None:
    for name, one in found.rest.items():
        if EXPERTS in name and name.endswith(".input_zero_point") and bool(one.read().any()):
            raise ValueError(
                f'{name}: inputs have a zero point, which no format of ours has; give inputs="" '
                f"to leave them in floats, or quantise them without (in {one.file})"
            )
