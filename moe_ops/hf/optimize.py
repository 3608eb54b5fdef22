"""`optimize` and `restore`: switch a transformers model to our ops, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.checks.options import check_type
from moe_ops.hf.adapters.wrapped import run_apart, run_as_wrapped
from moe_ops.hf.experts import NAME, is_experts
from moe_ops.hf.report import info_once
from moe_ops.hf.rules import RULES, Rule, router_fingerprint
from moe_ops.hf.stored import stored_format
from moe_ops.installed import inside_of_peft
from moe_ops.interop.subclass import former_class, new_object, subclass
from moe_ops.interop.switches import Board
from moe_ops.ops import route

log = logging.getLogger("moe_ops")
Model = TypeVar("Model", bound=PreTrainedModel)

STRICT = (
    "torch.export of a compiled %s with strict=True holds the model's own code, as Dynamo reads "
    "it, and no op of moe_ops; leave strict out, or export moe_ops.optimize(model)"
)
WANTS_GRADIENT = (
    "torch.export of a compiled %s holds the model's own code, and no op of moe_ops: its "
    "parameters require gradients; export it under torch.no_grad()"
)
_STATE = "_moe_ops_state"
_RULE = "_moe_ops_rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What `restore` needs: configs with their former implementation, the swapped routers."""

    configs: tuple[tuple[Any, str | None], ...]
    routers: tuple[nn.Module, ...]


def optimize(model: Model) -> Model:
    """Make a transformers model run its routers and experts on our ops; changes it in place.

    Sets the experts implementation "moe_ops" and gives every router whose code we know a forward
    that calls `route` and returns what transformers expects (logits, weights, ids). Weights, state
    dict and results stay as they are; experts or routers that our ops cannot express keep
    transformers' own code, with one logged reason. Experts that peft wraps, by `target_parameters`,
    run with weights and adapters apart; call it again where peft wraps more. Otherwise a second
    call changes nothing. `restore` undoes it.

    Raises TypeError for anything but a transformers PreTrainedModel or a PeftModel of one.
    """
    inside = inside_of_peft(model)
    if not isinstance(inside, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}; "
            "give what a wrapper holds, and call the ops of moe_ops directly in other models"
        )
    adapted = run_apart(inside, Board())
    if hasattr(inside, _STATE):
        return model
    experts = [m for m in inside.modules() if is_experts(m)]
    if not experts:
        log.warning("moe_ops.optimize: %s has no experts to optimize", type(inside).__name__)
    configs = _configs(inside)
    inside.set_experts_implementation(NAME)
    routers = tuple(m for m in inside.modules() if _swap(m))
    setattr(inside, _STATE, State(configs=configs, routers=routers))
    counts = len(experts), len(routers), adapted
    log.info("moe_ops.optimize: %d experts modules, %d routers, %d with adapters", *counts)
    return model


def restore(model: Model) -> Model:
    """Undo `optimize`: the model runs the code it ran before; no-op on a model not optimized.

    Raises TypeError for anything but a module, ValueError if the experts were quantised since:
    their former weights are gone.
    """
    check_type("model", model, nn.Module, "the model that was optimized")
    given, model = model, inside_of_peft(model)
    state: State | None = getattr(model, _STATE, None)
    if state is None:
        return given
    if any(stored_format(m) is not None for m in model.modules()):
        raise ValueError(
            "the experts hold quantised weights, which only moe_ops runs; load the model again"
        )
    for config, implementation in state.configs:
        config._experts_implementation_internal = implementation
    for router in state.routers:
        router.__class__ = former_class(router)
        delattr(router, _RULE)
    for module in model.modules():
        run_as_wrapped(module)
    delattr(model, _STATE)
    return given


class WhileExported:
    """Has a model call our ops while torch.export traces it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @contextmanager
    def on_ops(self) -> Iterator[None]:
        """A context in which the model is optimized, unless a gradient is wanted; afterwards it is
        what it was."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._model.parameters()):
            log.warning(WANTS_GRADIENT, type(self._model).__name__)
            yield
            return
        if hasattr(self._model, _STATE):
            yield
            return
        optimize(self._model)
        try:
            yield
        finally:
            restore(self._model)

    @torch.compiler.assume_constant_result  # Dynamo, which reads a strict export, calls it as it is
    def tell_of_strict(self) -> None:
        """Warn that a strict export holds the model's own code, unless that is on our ops."""
        if not hasattr(self._model, _STATE):
            log.warning(STRICT, type(self._model).__name__)


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a router of transformers whose forward we know, optimized or not; None of any
    other module."""
    key = getattr(module, _RULE, None)
    if key is None:
        if not type(module).__module__.startswith("transformers."):
            return None
        key = router_fingerprint(module)
    return RULES.get(key)


def _configs(model: PreTrainedModel) -> tuple[tuple[Any, str | None], ...]:
    """The distinct configs of a model and its submodels, each with its experts implementation."""
    found: dict[int, tuple[Any, str | None]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation_internal"):
            found[id(config)] = (config, config._experts_implementation_internal)
    return tuple(found.values())


def _swap(module: nn.Module) -> bool:
    """Give a router with a known forward our own; whether that was done."""
    if not type(module).__module__.startswith("transformers."):
        return False
    key = router_fingerprint(module)
    if key not in RULES:
        if "router" in type(module).__name__.lower():
            log.info("%s keeps its own forward (fingerprint %s)", type(module).__name__, key)
        return False
    if "forward" in vars(module):
        log.info("%s keeps its own forward: it is wrapped already", type(module).__name__)
        return False
    setattr(module, _RULE, key)
    module.__class__ = subclass(OptimizedRouter, type(module))  # type: ignore[arg-type]
    return True


class OptimizedRouter(nn.Module):
    """What `optimize` puts before the class of a router.

    A class, because all layers share it: a forward of each module's own would be compiled anew for
    every layer.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The router through `route`; its own code where gradients, autocast or its configuration
        need that."""
        if not isinstance(self, OptimizedRouter):  # what wrapped it before `restore` calls it still
            return type(self).forward(self, hidden_states, *args, **kwargs)
        own = super().forward
        rule = RULES[getattr(self, _RULE)]
        device = hidden_states.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # which raises for meta
            return own(hidden_states, *args, **kwargs)
        if torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(p.requires_grad for p in self.parameters())
        ):
            return own(hidden_states, *args, **kwargs)
        logits_TE = rule.logits(self, hidden_states)
        given = args[0] if args else next(iter(kwargs.values()), None)
        arguments = rule.read(self, hidden_states, logits_TE, given)
        if isinstance(arguments, str):
            info_once(f"{type(self).__name__} keeps its own forward: {arguments}")
            return own(hidden_states, *args, **kwargs)
        weights_TK, ids_TK = route(logits_TE, **arguments)
        ids_TK = ids_TK.to(torch.int64)  # transformers indexes and scatters with int64
        first = logits_TE.float().softmax(-1) if rule.returns_probabilities else logits_TE
        return (ids_TK, weights_TK, first) if rule.logits_last else (first, weights_TK, ids_TK)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # Not what object gives: pickle finds classes by name, and this one has the name of another.
        return _new_router, (former_class(self),), reduced[2]


def _new_router(cls: type[nn.Module]) -> Any:
    return new_object(subclass(OptimizedRouter, cls))  # type: ignore[arg-type]
