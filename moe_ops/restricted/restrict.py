"""`restrict_experts`: a model, or layers of it, with some of their experts alone, in place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from moe_ops.checks.options import check_type
from moe_ops.checks.shapes import check_choice
from moe_ops.layer.module import MoELayer
from moe_ops.restricted.changes import (
    CPU,
    FREED,
    Layer,
    Restriction,
    refusal_of_tensors,
    restrict,
)
from moe_ops.restricted.keep import Keep, kept_of
from moe_ops.restricted.layers import layer_of

if TYPE_CHECKING:
    from moe_ops.restricted.models import Experts

ALONE = "layer"  # the name of a layer that is the model


def restrict_experts(model: nn.Module, keep: Keep, *, removed: str = FREED) -> Restriction:
    """Leave layers of experts the experts that are named, in place.

    Results are those with router logits of -inf for all others, within rounding: what a router
    normalises over all experts, it normalises over those kept. Its rows and its biases of the
    others are cut off with their weights, quantised or not. Experts are numbered anew, in the order
    of their ids.

    model: a model of transformers, optimized, quantised, compiled or not; a `MoELayer` with the
    experts of one rank; or a module that holds such layers. What was compiled runs with fewer
    experts from its next call on. Of a `MoELayer` without a gate, forward is given the logits of
    the kept experts from then on, and its state dict is that of a layer made with so many.

    keep: the ids of the experts that stay: for each layer by its name, or by that of the block that
    holds it (others stay whole), or one sequence for all layers. A layer keeps top_k at least, and
    as many of each of its router's groups.

    removed: what becomes of the other weights, "freed" or moved to the "cpu", from where
    `Restriction.undo` brings them back.

    Where all layers of a model of transformers keep as many, its configuration says so, and
    `save_pretrained` writes an ordinary checkpoint, which `from_pretrained` reads anywhere. Else
    `save_pretrained` raises ValueError, and losses that compare routers of all layers do not work.

    Raises TypeError or ValueError, naming the argument or the layer, and changes nothing: for
    layers and ids that are none, for routers that cannot choose among those kept as they would
    among all, for models whose class does not make every part of a layer from the number of
    experts, or whose routers we do not know, for adapters, experts over ranks, gradients,
    weights without numbers, and while routings are recorded or replayed.
    """
    check_type("model", model, nn.Module, "a module")
    check_choice("removed", removed, (FREED, CPU))
    layers = {name or ALONE: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    found = _experts_of(model)
    numbers = {name: m.num_experts for name, m in layers.items()}
    if found is not None:
        numbers |= found.numbers
    if not numbers:
        raise ValueError(
            f"{type(model).__name__} has no experts to restrict; give a Mixture-of-Experts model "
            "of transformers, a moe_ops.MoELayer, or a module that holds such layers"
        )
    kept = kept_of(keep, numbers, {} if found is None else found.blocks)
    plans = [layer_of(name, m, kept[name]) for name, m in layers.items() if name in kept]
    own, others = ([], []) if found is None else found.plans(kept)
    plans += own
    for plan in plans:
        _check(plan)
    return restrict(plans, others, removed)


def _experts_of(model: nn.Module) -> Experts | None:
    """The experts in modules of transformers, which is not imported for a model without."""
    if "transformers" not in sys.modules:
        return None
    from moe_ops.restricted.models import Experts

    return Experts.of(model)


def _check(plan: Layer) -> None:
    reason = refusal_of_tensors(plan)
    if reason is not None:
        raise ValueError(f"{plan.name} cannot be restricted: {reason}")
