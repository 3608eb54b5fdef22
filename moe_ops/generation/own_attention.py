"""Which attention a model's steps run: ours, where it computes what the model's own would."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Container, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_ops.forward.regions import decoder_layers
from moe_ops.generation import expanding, latents
from moe_ops.generation.one_query import NAME, Attention, attended, in_place_of, register
from moe_ops.interop.code_objects import forward_of, names_in
from moe_ops.interop.interrupts import let_through
from moe_ops.interop.subclass import subclass

log = logging.getLogger("moe_ops")

NONE: Mapping[Any, Any] = MappingProxyType({})
_registered: dict[Attention, str] = {}


def layers_of_steps(
    model: PreTrainedModel, implementation: str | None
) -> dict[nn.Module, nn.Module]:
    """For each decoder layer of a model whose attention is `implementation` what runs in its place
    in steps; empty if they stay as they are."""
    over_latents = latent_attention(model, implementation)
    ours = step_attention(model, implementation, over_latents)
    return stand_ins(model, ours, over_latents) if ours or over_latents else {}


def latent_attention(model: PreTrainedModel, implementation: str | None) -> dict[nn.Module, str]:
    """The attention modules whose steps leave latents as they are, each with the name of its
    attention; for others that have latents a reason is logged."""
    found: dict[nn.Module, str] = {}
    if implementation not in ("sdpa", "eager"):
        return found
    reasons: dict[str, None] = {}  # in order, each once
    for module in attention_modules(model):
        if not hasattr(module, expanding.METHOD):
            continue
        reason, eager = expanding.refusal(module), None
        if reason is None and implementation == "eager":
            if not isinstance(getattr(module, "sinks", None), Tensor):
                continue  # it was chosen over "sdpa"
            reason, eager = eager_refusal([module]), eager_of(module)
        if reason is None:
            found[module] = latents.register(eager)
        else:
            reasons[f"{type(module).__name__}: {reason}"] = None
    for reason in reasons:
        log.info("generate: steps expand all latents in %s", reason)
    return found


def step_attention(
    model: PreTrainedModel, implementation: str | None, others: Container[nn.Module] = ()
) -> str | None:
    """The name of the attention for steps of a model whose attention is `implementation`, but for
    modules among `others`; None if that stays, with a logged reason where it could have been ours.
    """
    if implementation not in ("sdpa", "eager"):
        return None
    modules = [m for m in attention_modules(model) if m not in others]
    if not modules:
        return None
    reason = refusal(modules)
    if reason is None and implementation == "eager":
        if not any(isinstance(getattr(m, "sinks", None), Tensor) for m in modules):
            return None  # it was chosen over "sdpa"
        reason = eager_refusal(modules)
    if reason is not None:
        log.info("generate: steps keep the model's attention (%s): %s", implementation, reason)
        return None
    register()
    return NAME if implementation == "sdpa" else register_in_place_of(eager_of(modules[0]))


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of the decoder's layers that look their attention up in transformers' table."""
    modules = model.get_submodule(decoder_layers(model)).modules()
    return [m for m in modules if "ALL_ATTENTION_FUNCTIONS" in names_in(forward_of(m))]


def eager_of(module: nn.Module) -> Any:
    """The function that its forward names for "eager", or None."""
    forward = forward_of(module)
    if "eager_attention_forward" not in names_in(forward):
        return None
    return forward.__globals__.get("eager_attention_forward")


def refusal(modules: list[nn.Module]) -> str | None:
    """Why another name for the attention could change what these modules do, or None."""
    for forward in {forward_of(m) for m in modules}:
        try:
            source = inspect.getsource(forward)
        except OSError as error:
            let_through(error)
            return f"{forward.__qualname__} has no source to look at"
        if source.count("_attn_implementation") != 1:
            return f"{forward.__qualname__} does more with its name than look it up"
        if "self.config._attn_implementation" not in source:
            return f"{forward.__qualname__} does not look its name up in self.config"
    return None


def eager_refusal(modules: list[nn.Module]) -> str | None:
    """Why the "eager" attention of these modules is not ours to compute, or None."""
    functions = {eager_of(m) for m in modules}
    if None in functions:
        return "some of its layers do not call it eager_attention_forward"
    if len(functions) != 1:
        return f"it is {len(functions)} functions"
    if not all(hasattr(m, "sinks") for m in modules):
        return "some of its layers know no sinks"
    (eager,) = functions
    for with_sinks in sorted({m.sinks is not None for m in modules}):
        if not same_results(eager, with_sinks):
            return f"{eager.__module__}.{eager.__name__} computes something else"
    return None


@functools.cache
def same_results(eager: Attention, with_sinks: bool) -> bool:
    """Whether a function computes what ours does, on a few numbers; from a module it may read only
    what ours knows of."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    with torch.no_grad():
        # Scores of 10 and more: a cap on them or another temperature would show.
        query, key, value = 4 * noise(2, 6, 1, 16), noise(2, 3, 11, 16), noise(2, 3, 11, 8)
        mask = torch.zeros(2, 1, 1, 11, device="cpu")
        mask[0, ..., 3:5] = mask[1, ..., :4] = mask[..., 9:] = torch.finfo(mask.dtype).min
        sinks = 3 * noise(6) if with_sinks else None
        module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
        beside = {"sliding_window": 2, "position_ids": torch.zeros(2, 1), "use_cache": True}
        want = attended(query, key, value, mask, 0.7, sinks)
        try:
            got = eager(
                module, query, key, value, mask,
                scaling=0.7, dropout=0.0, s_aux=sinks, **beside,
            )  # fmt: skip
        except Exception as error:  # whatever it is that somebody's function misses or raises
            let_through(error)
            return False
        out = got[0] if isinstance(got, tuple) else None
        return out is not None and out.shape == want.shape and torch.allclose(out, want, 1e-4, 1e-5)


def stand_ins(
    model: nn.Module, attention: str | None, over_latents: Mapping[nn.Module, str] = NONE
) -> dict[nn.Module, nn.Module]:
    """For each decoder layer a copy that runs this attention, and in the modules among
    `over_latents` the one that is named there.

    Copies share all but the configuration of their attention modules. To rename the attention in
    the model's own would change what everybody else computes with the model meanwhile.
    """
    names = {m: attention for m in attention_modules(model) if attention} | dict(over_latents)
    configs: dict[tuple[int, str | None], Any] = {}

    def copied(module: nn.Module) -> nn.Module:
        if module in names:
            renamed, key = copy.copy(module), (id(module.config), names[module])
            if key not in configs:
                configs[key] = copy.copy(module.config)
                configs[key]._attn_implementation_internal = names[module]
            renamed.config = configs[key]
            if module in over_latents:
                renamed.__class__ = subclass(latents.OverLatents, type(module))  # type: ignore[arg-type]
            return renamed
        children = {n: child and copied(child) for n, child in module._modules.items()}
        if all(children[n] is child for n, child in module._modules.items()):
            return module
        parent = copy.copy(module)
        parent._modules = children
        return parent

    return {layer: copied(layer) for layer in model.get_submodule(decoder_layers(model)).children()}


def register_in_place_of(eager: Attention) -> str:
    """Make ours known to transformers in place of `eager`; returns the name it has there."""
    if eager not in _registered:
        # A number: names that contain another attention's mean something to transformers.
        _registered[eager] = f"{NAME}_{len(_registered)}"
        ALL_ATTENTION_FUNCTIONS.register(_registered[eager], in_place_of(eager))
    return _registered[eager]
