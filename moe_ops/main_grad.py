"""Gradients of expert weights that are added to a float32 `main_grad` beside the weight.

The convention is Megatron's: a trainer gives a parameter an attribute `main_grad`, a float32 buffer
of its shape, in which gradients of several backwards are summed, reduced and given to an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.checks.options import check_type
from moe_ops.prepared import HoldsExperts
from moe_ops.registry.gradients import needs_grad

MAIN_GRAD, ADDED = "main_grad", "grad_added_to_main_grad"  # attributes of a parameter
_MARK = "_moe_ops_adds_to_main_grad"  # of a module of experts
IMPLEMENTATION = "moe_ops"  # of transformers' experts


def accumulate_into_main_grad(model: nn.Module) -> list[nn.Parameter]:
    """Have backwards add the gradients of a model's expert weights to their `main_grad`. Returns
    these weights.

    Of every `MoELayer` and of transformers' experts on our ops a backward then adds the gradient of
    both weights, where they require one, to `weight.main_grad` in float32. `weight.grad` stays as
    it is, None as a rule: no gradient in the weight's dtype is made. Gradients of all other
    parameters, biases of experts among them, go into `.grad` as before.

    The caller makes each main_grad before the first forward, a contiguous float32 tensor of the
    weight's shape on its device, clears it, and reduces it over ranks. Every backward through the
    experts adds, one by torch.autograd.grad for other tensors too. Forwards set
    `weight.grad_added_to_main_grad = True`, by which hooks of trainers know; a compiled graph
    leaves the attribute as this function sets it.

    A forward that is to be differentiated raises ValueError for a weight without a main_grad, for
    one of another dtype, shape or device, for a weight that is no leaf, and under transforms of
    torch.func; a backward does with create_graph=True.

    Raises TypeError for anything but a module, and ValueError for a model without experts that
    train on our ops.
    """
    check_type("model", model, nn.Module, "the model that is trained")
    found: list[nn.Parameter] = []
    for name, module in model.named_modules():
        weights = [w for w in _weights(module) if w.requires_grad]
        if weights and not _on_ops(module):
            raise ValueError(
                f"{name or 'model'} ({type(module).__name__}) runs transformers' own code, whose "
                "gradients go into .grad; call moe_ops.optimize(model) first"
            )
        if weights:
            setattr(module, _MARK, True)
            found += [w for w in weights if all(w is not other for other in found)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts whose weights train, and no gradients to add; "
            "give a model with a MoELayer or with transformers' experts, of plain weights that "
            "require grad"
        )
    for weight in found:
        setattr(weight, ADDED, True)
    return found


def main_grads(module: nn.Module, w13: Tensor, w2: Tensor) -> dict[str, Tensor | None] | None:
    """What a backward through a module adds the gradients of its weights to, by the arguments of
    `experts_accumulating`; None where it adds none.

    Raises ValueError for a weight that wants a gradient and has no main_grad, or is no leaf.
    """
    if not (adds(module) and needs_grad(w13, w2)):
        return None
    return {"main_grad13_EFD": _main_grad(module, w13), "main_grad2_EDI": _main_grad(module, w2)}


def adds(module: nn.Module) -> bool:
    """Whether gradients of a module's weights are to be added to their main_grad."""
    return bool(getattr(module, _MARK, False))


def _main_grad(module: nn.Module, weight: Tensor) -> Tensor | None:
    if not weight.requires_grad:
        return None
    what = f"a weight {tuple(weight.shape)} of {type(module).__name__}"
    if not weight.is_leaf:
        raise ValueError(
            f"{what} is computed from others, and main_grad is of parameters; train without "
            "accumulate_into_main_grad, or make it a parameter"
        )
    found: Tensor | None = getattr(weight, MAIN_GRAD, None)
    if found is None:
        raise ValueError(
            f"{what} has no main_grad to add its gradient to; before the first forward set "
            "weight.main_grad = torch.zeros_like(weight, dtype=torch.float32), for each weight "
            "that accumulate_into_main_grad returns"
        )
    if not torch.compiler.is_compiling():  # a trainer may clear it for each step
        setattr(weight, ADDED, True)
    return found


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """The plain weights of a module of experts; none of any other."""
    if isinstance(module, HoldsExperts):
        names = [module.expert_names[argument] for argument in ("w13_EFD", "w2_EDI")]
    elif hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
        names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    else:
        return
    held = (getattr(module, name, None) for name in names)
    yield from (w for w in held if isinstance(w, nn.Parameter))


def _on_ops(module: Any) -> bool:
    """Whether a module's forward calls our ops: a layer's does, and that of transformers' experts
    if it was told to."""
    if isinstance(module, HoldsExperts) or hasattr(module, "_moe_ops_over"):
        return True
    config = getattr(module, "config", None)
    return getattr(config, "_experts_implementation", None) == IMPLEMENTATION
